"""A rank: its place, its groups and its arrays, and how it answers a case."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .contract import LeftOut, Malformed, returned

SAID = 300  # characters of what a function raises
TYPES = ("float32", "float64", "bfloat16")


class Usage(ValueError):
    """The user asked for something that does not exist, such as a module or a function."""


class Unable(RuntimeError):
    """This machine lacks what was asked for: torch, GPUs."""


def split_function(place: str) -> tuple[str, str]:
    """Module and name of MODULE:NAME or FILE.py:NAME."""
    module, _, name = place.rpartition(":")
    if not module or not name:
        raise Usage(f"--function is {place!r}; it must be MODULE:NAME or FILE.py:NAME")
    return module, name


def load(place: str) -> Callable[..., Any]:
    """The function of MODULE:NAME or FILE.py:NAME."""
    module, name = split_function(place)
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).resolve().parent))
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            if spec is None or spec.loader is None:
                raise ImportError(f"{module} is no Python file")
            found = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = found
            spec.loader.exec_module(found)
        else:
            sys.path.insert(0, os.getcwd())
            found = importlib.import_module(module)
    except Exception as error:  # a module may do anything
        raise Usage(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(found, name, None)
    if callable(function):
        return function
    names = ", ".join(sorted(n for n in vars(found) if callable(getattr(found, n)) and not n.startswith("_")))
    raise Usage(f"{module} has no function {name!r}; it has {names or 'none'}")


@dataclass(frozen=True)
class Grid:
    """Ranks of dp x cp x tp; those that differ in tp alone are neighbours."""

    dp: int
    cp: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        return (f"dp {self.dp} x " if self.dp > 1 else "") + f"cp {self.cp} x tp {self.tp}"

    def groups(self, rank: int) -> dict[str, list[int]]:
        """Ranks that differ from this one in dp, in cp, in either (data) and in tp alone."""
        all_ranks = np.arange(self.ranks).reshape(self.dp, self.cp, self.tp)
        d, c, t = (int(i[0]) for i in np.nonzero(all_ranks == rank))
        found = {"dp": all_ranks[:, c, t], "cp": all_ranks[d, :, t], "data": all_ranks[:, :, t], "tp": all_ranks[d, c]}
        return {name: [int(r) for r in members.flat] for name, members in found.items()}


class Here:
    """A rank, with NumPy arrays and its groups."""

    forward_only = False  # the function has no gradients, by --forward-only
    lacks_gradients = False  # they were asked for, and the function returned no way to them

    def __init__(self, rank: int, grid: Grid, kind: str, groups: Mapping[str, Any], mesh: Any = None) -> None:
        self.rank, self.cp, self.tp, self.kind, self.mesh = rank, grid.cp, grid.tp, kind, mesh
        self._groups = groups

    def group(self, name: str) -> Any:
        return self._groups[name]

    def array(self, values: np.ndarray) -> Any:
        return np.array(values, dtype=self.kind)

    leaf = array

    def integers(self, values: Any) -> Any:
        return np.array(values, dtype=np.int32)

    def ids(self, values: Any) -> Any:
        """Ids of tokens: int64, as torch indexes by."""
        return np.array(values, dtype=np.int64)

    def booleans(self, values: np.ndarray) -> Any:
        return np.array(values, dtype=bool)

    @staticmethod
    def is_nothing(out: Any, leaves: Sequence[Any]) -> bool:
        """Whether a shard is empty: without a value, or nothing to differentiate by. Its gradients are 0."""
        return 0 in out.shape or all(0 in leaf.shape for leaf in leaves)

    def gradients(self, out: Any, d_out: Any, leaves: Sequence[Any], backward: Any) -> Sequence[Any]:
        """The gradients of the leaves; none with forward_only, or if the function returned no way to them."""
        if self.forward_only or backward is None:
            if not self.forward_only and self.is_nothing(out, leaves):
                return [np.zeros(leaf.shape, self.kind) for leaf in leaves]
            self.lacks_gradients = not self.forward_only
            return ()
        found = backward(d_out)
        values = found if isinstance(found, (tuple, list)) else (found,)
        if len(values) != len(leaves):
            raise Malformed("other-type", f"backward returned {len(values)} gradients; there must be {len(leaves)}")
        return values


class TorchHere(Here):
    """A rank with tensors, on a CPU or a GPU."""

    def __init__(self, *args: Any, device: str) -> None:
        super().__init__(*args)
        self.device = device

    def array(self, values: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(np.array(values, order="C")).to(self.device, getattr(torch, self.kind))

    def leaf(self, values: np.ndarray) -> Any:
        return self.array(values).requires_grad_()

    def integers(self, values: Any) -> Any:
        import torch

        return torch.from_numpy(np.array(values, dtype=np.int32)).to(self.device)

    def ids(self, values: Any) -> Any:
        import torch

        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self.device)

    def booleans(self, values: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(np.array(values, dtype=bool)).to(self.device)

    def gradients(self, out: Any, d_out: Any, leaves: Sequence[Any], backward: Any) -> Sequence[Any]:
        import torch

        if backward is not None or self.forward_only:
            return super().gradients(out, d_out, leaves, backward)
        if hasattr(out, "to_local"):
            out = out.to_local()
        if not out.requires_grad:
            if self.is_nothing(out, leaves):
                return [torch.zeros_like(leaf) for leaf in leaves]
            self.lacks_gradients = True
            return ()
        found = torch.autograd.grad(out, leaves, d_out.to(out.dtype), allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves)]


def unpacked(answer: Any) -> tuple[Any, Any]:
    """A value and its way back, if one was returned."""
    if not isinstance(answer, (tuple, list)):
        return answer, None
    if len(answer) != 2:
        raise Malformed(
            "other-type", f"{len(answer)} values were returned; there must be 1, or 2 with a gradient's function"
        )
    return answer[0], answer[1]


def differentiated(
    function: Callable[..., Any], leaves: Mapping[str, tuple[str, np.ndarray]], value: str, shape: tuple[int, ...],
    d_value: np.ndarray, kinds: Sequence[str], here: Here,
) -> dict[str, np.ndarray]:
    """What a function of the leaves returns, and its gradients.

    leaves: by the name of the array that the gradient becomes, what they are called and what they are. value, shape,
    kinds: of what the function returns; d_value: its gradient.
    """
    tensors = [here.leaf(array) for _, array in leaves.values()]
    found, backward = unpacked(function(*tensors))
    arrays = {value: returned(value, found, shape, kinds)}
    for (name, (called, array)), gradient in zip(
        leaves.items(), here.gradients(found, here.array(d_value), tensors, backward)
    ):
        arrays[name] = returned(f"the gradient of {called}", gradient, array.shape, kinds)
    return arrays


def torch_or_refusal() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise Unable(f"torch cannot be imported ({error}); --backend numpy needs none") from error
    return torch


def torch_here(rank: int, backend: str, grid: Grid, kind: str) -> TorchHere:
    """The place of a rank of torch's default group, which exists. The mesh is of cp and tp; with dp > 1, of all three."""
    torch = torch_or_refusal()
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if backend == "nccl" else "cpu"
    whole = init_device_mesh(device, (grid.dp, grid.cp, grid.tp), mesh_dim_names=("dp", "cp", "tp"))
    groups = {name: whole.get_group(name) for name in ("dp", "cp", "tp")}
    groups["data"] = groups["cp"]
    if grid.dp > 1:
        data, _ = torch.distributed.new_subgroups_by_enumeration([grid.groups(t)["data"] for t in range(grid.tp)])
        groups["data"] = data
    where = f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu"
    return TorchHere(rank, grid, kind, groups, whole if grid.dp > 1 else whole["cp", "tp"], device=where)


def check_gpus(backend: str, ranks: int) -> None:
    """Unable: nccl was asked for, and there are fewer GPUs than ranks."""
    if backend == "nccl":
        torch = torch_or_refusal()
        if torch.cuda.device_count() < ranks:
            raise Unable(
                f"--backend nccl needs {ranks} GPUs, one a rank; torch finds {torch.cuda.device_count()}. "
                "--backend gloo runs on CPUs"
            )


def answer(
    contract: Any, function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> tuple[Any, ...]:
    """Runs one case on this rank; returns (status, arrays or a text, ...)."""
    try:
        if getattr(function, "needs_gpu", False) and getattr(here, "device", "cpu") == "cpu":
            return "left out", "the function needs a GPU: --backend nccl"
        here.lacks_gradients = False
        return "done", contract.call(function, piece, needs, here), here.lacks_gradients
    except LeftOut as error:
        return "left out", str(error)
    except NotImplementedError as error:
        return "refused", " ".join(str(error).split())[:SAID] or "not implemented"
    except Malformed as error:
        return "malformed", error.kind, error.text
    except Exception as error:  # the function may do anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:SAID]
        return "raised", f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"
