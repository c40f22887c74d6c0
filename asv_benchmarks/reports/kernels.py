"""``make kernels``: compile every kernel for GPUs that need not be here, and say what it takes of them.

The interpreter runs what the compiler may refuse. The host code runs as it is; only launches stop after
the compilation. The page has a digest of all that is compiled, by which a test finds out that it is too old.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
import typer
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from asv_benchmarks.reports.tables import Table
from gemproj import FISTA, PGD, Exact
from gemproj.backends import triton as package
from gemproj.backends.triton._layout import lay_out, lay_out_batch
from gemproj.backends.triton.combine import combine
from gemproj.backends.triton.gram import gram, supports
from gemproj.backends.triton.solve import solve

HEAD = ["kernel", "for", "registers", "spilled, bytes", "shared, bytes", "loads of\n16 bytes", "other\nloads"]
NOTE = (
    "Triton {version}, sm_{arch}: registers of a thread and what spills out of them, shared memory of a "
    "program, and how many instructions load 16 bytes or less from global memory. Compiled, not run."
)
DIGEST = "`make kernels` of the sources {digest}."
_COLUMNS = 9000
Call = Callable[[], object]


class Driver:
    """A device that is only ever compiled for."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Return a number of its own: kernels are kept for each device."""
        return self._arch

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def variants(every: bool) -> dict[str, Call]:
    """Return calls that together ask for all variants, or for one of each kind, by what they are for."""
    calls: dict[str, Call] = {}
    f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64

    def stage1(name: str, at: Any) -> None:
        if supports(at):
            calls[name] = partial(gram, at)

    def one(t: int, dtype: torch.dtype) -> Any:
        return lay_out([torch.ones(t, _COLUMNS, dtype=dtype)], [torch.ones(_COLUMNS, dtype=dtype)])

    # 5 and 6 rows are one kernel.
    for t in (1, 2, 4, 5, 6, 8, 9, 17, 40, 100) if every else (5, 9):
        stage1(f"t = {t}, float32", one(t, f32))
    for t in (2, 8, 9, 40) if every else ():
        stage1(f"t = {t}, bfloat16", one(t, bf16))
        stage1(f"t = {t}, float64", one(t, f64))
    for t in (2, 8, 9, 40) if every else ():
        stage1(
            f"t = {t}, blocks of float32", lay_out([torch.ones(t, _COLUMNS)] * 2, [torch.ones(_COLUMNS)] * 2)
        )
    mixed = [torch.ones(3, _COLUMNS, dtype=dtype) for dtype in (torch.float16, bf16, f64)]
    many = [torch.ones(12, _COLUMNS, dtype=dtype) for dtype in (f32, bf16)]
    three, lam = lay_out(mixed, [a[0].float() for a in mixed]), torch.ones(9, 3, dtype=f64)
    if every:
        stage1("t = 3, blocks of three dtypes", three)
        stage1("t = 12, blocks of two dtypes", lay_out(many, [a[0] for a in many]))
    for t in (1, 2, 8, 9, 40) if every else ():
        for d in (64, 200):
            stage1(f"t = {t}, batch of d = {d}", lay_out_batch(torch.ones(9, t, d), torch.ones(9, d)))
    assert three is not None
    calls["blocks of three dtypes"] = partial(combine, three, lam[:1], [a[0].float() for a in mixed])
    pair = lay_out([torch.ones(2, _COLUMNS)] * 2, [torch.ones(_COLUMNS)] * 2)
    assert pair is not None
    if every:
        calls["blocks of float32"] = partial(combine, pair, lam[:1, :2], [torch.ones(_COLUMNS)] * 2)
    small = lay_out_batch(torch.ones(9, 3, 64), torch.ones(9, 64))
    assert small is not None
    calls["batch of d = 64"] = partial(combine, small, lam, [torch.ones(9, 64)])
    for dtype in (f32, bf16, f64) if every else ():
        x = torch.empty(_COLUMNS, dtype=dtype)
        calls[str(dtype).removeprefix("torch.")] = partial(combine, one(2, dtype), lam[:1, :2], [x])
    methods: list[tuple[int, Any]] = [(2, FISTA()), (4, Exact()), (9, Exact())]
    if every:
        methods = [(2, PGD()), *methods, (2, PGD(normalize=False))]
        methods += [(t, method) for t in (16, 32, 64, 128, 168) for method in (PGD(), FISTA(), Exact())]
        methods += [(t, Exact()) for t in (1, 2, 3, 5, 8)]
    for t, method in methods:
        K, b = torch.eye(t, dtype=f64), torch.ones(t, dtype=f64)
        name = f"t = {t}, {type(method).__name__}"
        calls[f"{name}, bounded"] = partial(solve, K, b, method=method, lower=-b, upper=1.0, start=b)
        if every:
            calls[name] = partial(solve, K, b, method=method)
            if isinstance(method, Exact):
                calls[f"{name}, multipliers"] = partial(solve, K, b, method=method, only_multipliers=True)
    for t in (4, 8) if every else ():
        K, b = torch.eye(t, dtype=f64).repeat(9, 1, 1), torch.ones(9, t, dtype=f64)
        exact = partial(solve, K, b, method=Exact())
        calls[f"t = {t}, Exact, batch, bounded"] = partial(exact, lower=-b, upper=1.0, start=b)
        calls[f"t = {t}, Exact, batch"] = exact
        calls[f"t = {t}, Exact, batch, multipliers"] = partial(exact, only_multipliers=True)
    return calls


def resources(kernel: Any) -> tuple[int, int, int, int]:
    """Return registers, spilled bytes, and loads of 16 bytes and of fewer, of a compiled kernel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        code = _output(tools / "nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    loads = re.findall(r"\bLDG\.\S+", code)
    return registers, stack, sum(".128" in load for load in loads), sum(".128" not in load for load in loads)


Found = dict[tuple[Any, ...], tuple[str, str, Any]]


def asked_for(every: bool, compiled: Callable[..., Any], title: str = "") -> Found:
    """Return name, purpose and what `compiled` returns of each kernel that is asked for, by its constants."""
    found: Found = {}
    now = ""

    def launch(
        kernel: Any, programs: int, arguments: Any, constants: Any, device: Any, **options: Any
    ) -> None:
        name = kernel.fn.__name__.lstrip("_")
        key = (name, constants, *options.values())
        if key not in found:
            done = compiled(kernel, *arguments, *constants, grid=(programs,), **options)
            found[key] = name, now, done

    with ExitStack() as stack:
        for module in ("gram", "solve", "combine"):
            stack.enter_context(patch(f"{package.__name__}.{module}.launch", launch))
        shown = Console(stderr=True, quiet=not title)
        for about, call in track(variants(every).items(), title, console=shown):
            now = about
            call()
    return found


def compile_all(arch: int, every: bool) -> list[tuple[str, str, Any]]:
    """Return for each kernel that is asked for its name, what for, and the compiled kernel."""
    driver.set_active(Driver(arch))
    return list(
        asked_for(every, lambda kernel, *args, **how: kernel.warmup(*args, **how), f"sm_{arch}").values()
    )


def listed() -> tuple[str, list[list[str]]]:
    """Return the line with the digest of everything that is compiled, and the beginnings of all rows."""
    found = asked_for(True, lambda *args, **how: None)
    parts = [repr(key) for key in found]
    for info in pkgutil.iter_modules(package.__path__):
        for name, value in vars(import_module(f"{package.__name__}.{info.name}")).items():
            if isinstance(value, tl.constexpr):
                parts.append(f"{name} = {value.value!r}")
            elif inspect.isfunction(getattr(value, "fn", None)):
                parts.append(inspect.getsource(value.fn))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return DIGEST.format(digest=digest), [[name, about] for name, about, _ in found.values()]


def main(
    arch: Annotated[str, typer.Option(help="Compute capabilities, separated by commas.")] = "80,90",
    every: Annotated[bool, typer.Option(help="Every variant, or one of each kind.")] = True,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Compile, and print what each kernel takes."""
    text = [listed()[0], ""]
    console = Console(width=110, highlight=False)
    for one in map(int, arch.split(",")):
        note = NOTE.format(version=triton.__version__, arch=one)
        table = Table(f"sm_{one}", HEAD)
        for name, about, kernel in compile_all(one, every):
            registers, stack, wide, other = resources(kernel)
            cells = (registers, stack, kernel.metadata.shared, wide, other)
            table.rows.append([name, about, *map(str, cells)])
        console.print(note)
        console.print(table.rich())
        text += [note, "", table.markdown(), ""]
    if out is not None:
        out.write_text("\n".join(text))


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    typer.run(main)
