"""Beside a program for DeepSpeed: with `from megazero import deepspeed` in place of `import deepspeed` its loop stays.

    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="ds.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The configuration is DeepSpeed's: `megazero.config.deepspeed` says which keys mean what here, and refuses others.
"""

from megazero.deepspeed import zero
from megazero.deepspeed.called import DeepSpeedEngine
from megazero.deepspeed.initialize import add_config_arguments, init_distributed, initialize

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"]
