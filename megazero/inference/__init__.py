"""Text from a model: `generate` over any grid, `Sampling`, `Stream` for its text."""
