"""What a graph of autograd has saved for its backward, copied to host memory and back.

A hook sees every tensor that autograd saves (`torch.autograd.graph.saved_tensors_hooks`), those of `save_for_backward`
included. Tensors that share memory are one piece: it is copied once, and they share memory again when it is back.

What something else holds too is left where it is: parameters, whole or gathered, whose memory comes and goes by
itself; the tensors of a micro-batch; constants that a layer keeps; hidden states on their way to another stage. Copying
it would free nothing. The owners of a piece are counted when it is to leave, after the forward: by then a graph alone
owns what it alone keeps.

On a CUDA device nothing here waits on the host. A copy out begins behind the forward on the stream, memory is freed on
the stream that has waited for the copy, and memory for a copy back is taken from the same stream.

From host memory it may go on to disks (`pipeline.kept_disks`). Then host memory is a few buffers of one size. What does
not fit into one of them stays on the device.

What no copy of bytes brings back as it was stays, too: tensors that are not strided, lazy conjugates, subclasses, and
what lies on another device. Autograd compares no versions of what hooks save, so that is done here: a tensor that was
changed in place since would make a wrong gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megazero.config.tiers import Tier
from megazero.pipeline.kept_disks import FLAG, ActivationDisks, GrowingDisks, WrittenGraph
from megazero.program.instruction import ACTIVATION_READS, ACTIVATION_WRITES, LEAVE, Free, Kind, Piece, TierMove
from megazero.system.host_copies import CopyError, CopyLane, HostBuffers, PairCopier

ALIGNMENT = 64
"""Each piece begins at a multiple of it in a host buffer: a cache line."""


class _Saved:
    """A saved tensor. Autograd holds this, and has the tensor from it in backward.

    tensor: itself, without a history; None while its memory is on the host.
    """

    __slots__ = ("__weakref__", "dtype", "offset", "size", "stride", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # an output's own history would be a cycle
        self.version = tensor._version
        self.dtype = tensor.dtype
        if tensor.layout is torch.strided:
            self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def place(self, memory: Tensor) -> None:
        """Make the tensor a view of this memory, uint8."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        self.tensor = empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        self.version = self.tensor._version

    def require_same(self) -> None:
        """Raise RuntimeError, as autograd does, if the tensor was changed in place since it was saved."""
        if self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self.dtype} and shape {[*self.tensor.shape]} is at version {self.tensor._version}, and "
                f"was saved for backward at version {self.version}"
            )


def _unpack(saved: _Saved) -> Tensor:
    assert saved.tensor is not None, "a backward reads activations that are on the host"
    saved.require_same()
    return saved.tensor


@dataclass(frozen=True)
class _Piece:
    """Memory that leaves. views: the saved tensors in it, as far as autograd still has them. at: where its copy begins
    in the host buffer.
    """

    views: tuple[weakref.ref[_Saved], ...]
    at: int
    nbytes: int

    def alive(self) -> list[_Saved]:
        return [saved for view in self.views if (saved := view()) is not None]


class HostActivations:
    """Host memory for the activations of a rank, and the two lanes of copies. disks: where they go on from there; None:
    nowhere.
    """

    def __init__(self, device: torch.device, disks: ActivationDisks | GrowingDisks | None = None) -> None:
        self.device, self.disks = device, disks
        self.buffers = HostBuffers(device, FLAG)
        self._buffers_of: ActivationDisks | None = None
        """The disks that read and write the buffers."""
        if isinstance(disks, ActivationDisks):
            self.pass_through(disks)
        self.to_host: PairCopier = CopyLane(device, "to host memory")
        self.to_device: PairCopier = CopyLane(device, "to the device")

    def graph(self, name: str) -> KeptTensors:
        """What one graph keeps. name: in words, for errors."""
        return KeptTensors(self, name)

    def expect(self, pieces: int) -> None:
        """See `pipeline.actions.ActivationActions`."""
        if self.disks is not None:
            self.disks.expect(pieces, self.device)

    def pass_through(self, disks: ActivationDisks) -> None:
        """Have buffers of these disks from now on. Graphs that are away have others until they are back."""
        if self._buffers_of is not disks:
            self._buffers_of, self.buffers = disks, HostBuffers(self.device, FLAG, disks.store.allocate)

    def close(self) -> None:
        """End the lanes, and free the host memory once no copy uses it."""
        self.to_host.close()
        self.to_device.close()
        if self.disks is not None:
            self.disks.close()
        self.buffers.clear()


class KeptTensors:
    """What one graph has saved; `HostActivations.graph` makes one. See `pipeline.actions.KeptGraph`."""

    def __init__(self, host: HostActivations, name: str) -> None:
        self._host, self._name = host, name
        self._saved: dict[int, list[weakref.ref[_Saved]]] = {}
        """By the address of their memory. It cannot be used again while one of them is alive."""
        self._pieces: list[_Piece] = []
        self._buffer: Tensor | None = None
        self._buffers = host.buffers
        self._on_disk: WrittenGraph | None = None
        self._copies: Callable[[], None] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which autograd saves tensors here."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        if _is_plain(tensor, self._host.device) and (address := tensor.untyped_storage().data_ptr()):
            self._saved.setdefault(address, []).append(weakref.ref(saved))
        return saved

    def move(self, kind: Kind) -> None:
        """See `pipeline.actions.KeptGraph`."""
        _MOVES[kind](self)

    def leave(self) -> None:
        """Start to copy what nobody else holds. Raises RuntimeError where there is no host memory."""
        leaving: list[tuple[tuple[weakref.ref[_Saved], ...], Tensor]] = []
        for views in self._saved.values():
            saved_here = [saved for view in views if (saved := view()) is not None]
            tensors = [saved.tensor for saved in saved_here]
            if tensors and tensors[0] is not None and _owners(tensors[0]) == len(tensors):
                for saved in saved_here:
                    saved.require_same()
                leaving.append((tuple(views), _flat(tensors[0])))
            del tensors, saved_here
        self._saved.clear()
        room = sum(_aligned(memory.nbytes) for _, memory in leaving)
        if self._host.disks is not None:
            if not leaving:
                return
            disks = self._host.disks.holding(room, sum(memory.nbytes for _, memory in leaving), self._name)
            room, self._on_disk = disks.buffer_bytes, WrittenGraph(disks, self._host.device, self._name)
            leaving = [pair for pair in leaving if pair[1].nbytes <= room]
            if not leaving or not self._on_disk.reserve():
                return
            self._host.pass_through(disks)
        self._buffers = self._host.buffers
        pairs: list[tuple[Tensor, Tensor]] = []
        at = 0
        for views_of, memory in leaving:
            if at + memory.nbytes > room:
                continue
            self._buffer = self._buffers.take(room) if self._buffer is None else self._buffer
            self._pieces.append(_Piece(views_of, at, memory.nbytes))
            pairs.append((self._copy_of(self._pieces[-1]), memory))
            at += _aligned(memory.nbytes)
        self._copies = self._host.to_host.start(pairs) if pairs else None

    def _copy_of(self, piece: _Piece) -> Tensor:
        """The host's copy of a piece, uint8."""
        assert self._buffer is not None, "activations are read that are not in host memory"
        return self._buffer[piece.at : piece.at + piece.nbytes]

    def free(self) -> None:
        """Free the memory on the device, once it is copied. Raises CopyError if it could not be."""
        self._wait()
        for piece in self._pieces:
            for saved in piece.alive():
                saved.tensor = None

    def come_back(self) -> None:
        """Take memory on the device, and start to copy into it."""
        if self._on_disk is not None:
            self._on_disk.wait()
        pairs: list[tuple[Tensor, Tensor]] = []
        for piece in self._pieces:
            if views := piece.alive():
                memory = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._host.device)
                for saved in views:
                    saved.place(memory)
                pairs.append((memory, self._copy_of(piece)))
        self._copies = self._host.to_device.start(pairs) if pairs else None

    def write(self) -> None:
        """Start to write the buffer to disks. The current stream has waited for the copy into it."""
        if self._buffer is not None:
            self._disk.write(self._buffer)

    def free_host(self) -> None:
        """Give the buffer back once it is written. Raises DiskError."""
        if self._buffer is not None:
            self._disk.wait()
            self._buffers.give(self._buffer)
            self._buffer = None

    def read(self) -> None:
        """Take a buffer, and start to read into it."""
        if self._pieces:
            self._buffer = self._buffers.take(self._disk.disks.buffer_bytes)
            self._disk.read(self._buffer)

    @property
    def _disk(self) -> WrittenGraph:
        assert self._on_disk is not None, "a list writes activations, and there are no disks"
        return self._on_disk

    def ready(self) -> None:
        """What the current stream does from now on finds everything on the device. Raises CopyError."""
        self._wait()
        self._pieces.clear()
        if self._buffer is not None:
            self._buffers.give(self._buffer)
            self._buffer = None

    def _wait(self) -> None:
        copies, self._copies = self._copies, None
        if copies is None:
            return
        try:
            copies()
        except CopyError as error:
            raise CopyError(f"activations of {self._name}: {error}") from error


_MOVES: Mapping[Kind, Callable[[KeptTensors], None]] = MappingProxyType(
    {
        LEAVE: KeptTensors.leave,
        Free(Piece.ACTIVATIONS, Tier.DEVICE): KeptTensors.free,
        TierMove(Piece.ACTIVATIONS, Tier.HOST, Tier.DEVICE): KeptTensors.come_back,
        **dict.fromkeys(ACTIVATION_WRITES, KeptTensors.write),
        Free(Piece.ACTIVATIONS, Tier.HOST): KeptTensors.free_host,
        **dict.fromkeys(ACTIVATION_READS, KeptTensors.read),
    }
)
"""What the instructions of `ACTIVATION_MOVES` do."""


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor on this device is its bytes, shape and strides."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type == device.type and not tensor.is_conj() and not tensor.is_neg()


def _owners(tensor: Tensor) -> int:
    """The tensors that share this one's memory, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without `storage`


def _flat(tensor: Tensor) -> Tensor:
    """All memory behind a tensor, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
