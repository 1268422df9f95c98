"""`deepspeed.zero` of a program for DeepSpeed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class Init(AbstractContextManager[None]):
    """A context whose modules have no values and take no memory. The first forward makes each unit's values with the
    methods `reset_parameters` of its modules.

    enabled              False: modules have values and memory
    dtype                that of parameters; None: torch's default
    config_dict_or_path  what `initialize` gets too; nothing is read here
    """

    def __init__(
        self, *, enabled: bool = True, dtype: torch.dtype | None = None, config_dict_or_path: Any = None
    ) -> None:
        self._dtype, self._device = dtype if enabled else None, torch.device("meta") if enabled else None

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*raised)
        torch.set_default_dtype(self._before)
