"""Modelled, not measured: times of this project's NKI kernels and of the reference kernels on Trainium2.

    python benchmarks/kernel_model.py

Every launch is simulated, recorded and scheduled by cost_model. Writes results/kernel.json (a list of rows, described at `Row`),
two plots beside it, and the table between the markers in README.md. Nothing runs on a device; it takes about ten minutes.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import math
import multiprocessing
import pathlib
import statistics
import sys

import torch
from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks" / "results"
MARKERS = ("<!-- modelled table: make bench writes it -->\n", "<!-- end of modelled table -->\n")

# (N, D, K): shapes of nki-library's tests and pull request, MoE combine, embedding backward, 1-D histogram.
SHAPES = (
    (128, 512, 512),
    (256, 2048, 2048),
    (512, 1024, 2048),
    (1024, 4096, 2048),
    (4096, 2880, 16384),
    (16, 512, 64),
    (10, 256, 200),
    (64, 1024, 512),
    (4096, 2048, 8192),
    (2048, 4096, 4096),
    (32000, 2048, 8192),
    (128256, 4096, 8192),
    (1024, 1, 8192),
)
DTYPES = (torch.float32, torch.bfloat16)
INDICES = ("unique", "repeats", "zipf", "equal")
KERNELS = ("plain", "one_row", "tile_combine", "ours")

# The one-row kernel waits for every row: its time grows with K, so that a longer launch is modelled by its first rows.
ONE_ROW_LIMIT = 256

# DMA bandwidth of a core, bytes/us ("Guideline to Avoid Under-Utilizing DMA Bandwidth", Bandwidth table).
BANDWIDTH = 368e3
GOAL_ROW_BYTES = 2048


@dataclasses.dataclass
class Row:
    """One modelled launch.

    kernel: one of KERNELS; `form` is what the planner chose for ours. indices: `unique` (within each 128 rows), uniform `repeats`,
    `zipf` (exponent 1), all `equal`. modelled_us: every assumption at its middle; low_us, high_us: all at their faster or slower
    end. ends, for ours in bfloat16 on `repeats`: assumption -> [us at its low end, us at its high end], the others at their
    middle. dma_bytes: bytes of HBM read and written. dma_limit_us: src read once, every distinct row of input read and written
    once, at the documented bandwidth of the cores in use. instructions: of the traced program, a hardware loop's body once.
    bound_by: the resource that is busy for most of the time, or latency. modelled_rows: rows of src that were modelled; where that
    is not K, the figures are scaled to K.
    """

    kernel: str
    form: str
    n: int
    d: int
    k: int
    dtype: str
    indices: str
    lnc: int
    modelled_us: float
    low_us: float
    high_us: float
    dma_bytes: int
    dma_limit_us: float
    instructions: int
    bound_by: str
    modelled_rows: int
    ends: dict


def make_index(kind, rows, count):
    """[count] int32, or None where `unique` cannot be."""
    generator = torch.Generator().manual_seed(0)
    if kind == "unique":
        if rows < min(count, 128):
            return None
        turns = [torch.randperm(rows, generator=generator) for _ in range(math.ceil(count / rows))]
        return torch.cat(turns)[:count].int()
    if kind == "equal":
        return torch.full((count,), rows // 2, dtype=torch.int32)
    if kind == "repeats":
        return torch.randint(rows, (count,), generator=generator).int()
    weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
    names = torch.randperm(rows, generator=generator)
    return names[torch.multinomial(weights, count, replacement=True, generator=generator)].int()


def _launch(kernel, rows, columns, dtype, lnc, index):
    """(launch(input, index, src), form) of a kernel by its name in KERNELS."""
    from torch_neuron_scatter import kernel_choice

    if kernel == "ours":
        call = kernel_choice.Call(rows, columns, dtype, dtype, False, False, lnc)
        chosen, _ = kernel_choice.choose(call)
        return lambda *operands: chosen.launch(chosen.load()[lnc], *operands, None, call), chosen.name
    module, name = {
        "plain": ("gather_add_store", "gather_add_store"),
        "one_row": ("one_row", "one_row_a_tile"),
        "tile_combine": ("tile_combine", "tile_combine"),
    }[kernel]
    function = getattr(importlib.import_module(f"benchmarks.reference_kernels.{module}"), name)
    return function[lnc], name


def model_case(case):
    """A Row for (kernel, shape, dtype, kind of indices, with_ends), or None where that cannot be."""
    import torch_neuron_scatter

    torch_neuron_scatter.stub.install()
    from benchmarks import cost_model

    kernel, (rows, columns, count), dtype, kind, with_ends = case
    index = make_index(kind, rows, count)
    if index is None:
        return None
    lnc = 2 if columns % 2 == 0 else 1
    distinct = index.unique().numel()
    limit = columns * dtype.itemsize * (count + 2 * distinct) / (BANDWIDTH * lnc)
    modelled_rows = min(count, ONE_ROW_LIMIT) if kernel == "one_row" else count
    scale = count / modelled_rows
    launch, form = _launch(kernel, rows, columns, dtype, lnc, index)
    with cost_model.record() as recording:
        launch(
            torch.zeros(rows, columns, dtype=dtype),
            index[:modelled_rows].contiguous(),
            torch.ones(modelled_rows, columns, dtype=dtype),
        )

    def microseconds(settings):
        return cost_model.model(recording, settings).total_us * scale

    schedule = cost_model.model(recording)
    ends = {}
    if with_ends:
        for name, _end, settings in cost_model.Settings.ends():
            ends.setdefault(name, []).append(round(microseconds(settings), 1))
    return Row(
        kernel=kernel,
        form=form,
        n=rows,
        d=columns,
        k=count,
        dtype=str(dtype).removeprefix("torch."),
        indices=kind,
        lnc=lnc,
        modelled_us=schedule.total_us * scale,
        low_us=microseconds(cost_model.Settings.all_at("low")),
        high_us=microseconds(cost_model.Settings.all_at("high")),
        dma_bytes=round(schedule.dma_bytes * scale),
        dma_limit_us=limit,
        instructions=round(schedule.program_instructions * scale),
        bound_by=schedule.bound_by,
        modelled_rows=modelled_rows,
        ends=ends,
    )


def model_all(shapes, workers):
    """Rows for every kernel, dtype and kind of indices; each assumption's ends for ours in bfloat16 on `repeats`."""
    cases = [
        (kernel, shape, dtype, kind, (kernel, dtype, kind) == ("ours", torch.bfloat16, "repeats"))
        for shape in sorted(shapes, key=lambda shape: -shape[1] * shape[2])
        for kind in INDICES
        for dtype in DTYPES
        for kernel in KERNELS
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        rows = list(tqdm(pool.map(model_case, cases), total=len(cases), desc="modelling", disable=None))
    order = {shape: number for number, shape in enumerate(shapes)}
    return sorted((row for row in rows if row), key=lambda row: order[row.n, row.d, row.k])


def _by_case(rows):
    cases = {}
    for row in rows:
        cases.setdefault((row.n, row.d, row.k, row.dtype, row.indices), {})[row.kernel] = row
    return cases


def goals(rows):
    """Lines that say whether each goal holds with every assumption at its middle, and what limits it where not."""
    cases = _by_case(rows)
    speedups = {
        case: kernels["tile_combine"].modelled_us / kernels["ours"].modelled_us for case, kernels in cases.items()
    }
    large = {case: value for case, value in speedups.items() if case[2] >= 512}
    worst = min(large, key=large.get)
    mean, mean_large = (statistics.geometric_mean(values.values()) for values in (speedups, large))
    lines = [
        f"against the per-tile combine, geometric mean over all rows: {mean:.2f} x (goal 2)",
        f"  from K = 512 up {mean_large:.2f} x, least {large[worst]:.2f} x at {worst} (goal 1.3)",
    ]
    for row in rows:
        wide = row.d // row.lnc * (4 if row.dtype == "float32" else 2) >= GOAL_ROW_BYTES
        if row.kernel == "ours" and wide and row.k >= 4096:
            ratio = row.modelled_us / row.dma_limit_us
            lines.append(
                f"{row.n} x {row.d}, K = {row.k}, {row.dtype}, {row.indices}: {ratio:.2f} x the DMA limit "
                f"({'met' if ratio <= 1.3 else 'MISSED, bound by ' + row.bound_by}, goal 1.3)"
            )
    for (n, d, k, dtype, indices), kernels in cases.items():
        unique = cases.get((n, d, k, dtype, "unique"))
        if indices != "unique" and unique is not None:
            ratio = kernels["ours"].modelled_us / unique["ours"].modelled_us
            if ratio > 1.15:
                lines.append(
                    f"{n} x {d}, K = {k}, {dtype}: {indices} takes {ratio:.2f} x of unique (MISSED, goal 1.15)"
                )
    return lines


def table(rows):
    """The README's table: bfloat16, uniform repeats and unique."""
    lines = [
        "| input | K | indices | per-tile combine, us | this, us | faster | all low, all high, us | x DMA limit | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (n, d, k, dtype, indices), kernels in _by_case(rows).items():
        if dtype != "bfloat16" or indices not in ("unique", "repeats"):
            continue
        ours, other = kernels["ours"], kernels["tile_combine"]
        lines.append(
            f"| {n} x {d} | {k} | {indices} | {other.modelled_us:.0f} | {ours.modelled_us:.0f} | "
            f"{other.modelled_us / ours.modelled_us:.1f} x | {ours.low_us:.0f}, {ours.high_us:.0f} | "
            f"{ours.modelled_us / ours.dma_limit_us:.2f} | {ours.bound_by} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows, path):
    """A PNG: modelled time over the DMA limit by shape, one line a kernel, the range of all assumptions shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(DTYPES), figsize=(15, 6), sharey=True)
    for panel, dtype in zip(panels, DTYPES, strict=True):
        name = str(dtype).removeprefix("torch.")
        for kernel in KERNELS:
            chosen = [r for r in rows if r.kernel == kernel and r.dtype == name and r.indices == "repeats"]
            places = range(len(chosen))
            panel.plot(places, [r.modelled_us / r.dma_limit_us for r in chosen], marker="o", label=kernel)
            low, high = ([getattr(r, end) / r.dma_limit_us for r in chosen] for end in ("low_us", "high_us"))
            panel.fill_between(places, low, high, alpha=0.15)
        panel.set_xticks(places, [f"{r.n}x{r.d}\nK={r.k}" for r in chosen], rotation=60, fontsize=7)
        panel.set(title=f"{name}, uniform repeats (modelled)", yscale="log", ylabel="modelled time / DMA limit")
        panel.axhline(1.3, linestyle=":", color="black")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_timeline(path):
    """A PNG of what every engine does in one launch: 32,000 x 4,096 bfloat16, K = 2,048."""
    import torch_neuron_scatter

    torch_neuron_scatter.stub.install()
    from benchmarks import cost_model

    rows, columns, count = 32000, 4096, 2048
    index = make_index("repeats", rows, count)
    launch, _ = _launch("ours", rows, columns, torch.bfloat16, 2, index)
    with cost_model.record() as recording:
        launch(
            torch.zeros(rows, columns, dtype=torch.bfloat16), index, torch.ones(count, columns, dtype=torch.bfloat16)
        )
    cost_model.model(recording).plot(path)


def write_readme(text, readme=ROOT / "README.md"):
    """Put the table between its markers."""
    before, _, rest = readme.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    readme.write_text(before + MARKERS[0] + "\n" + text + "\n" + MARKERS[1] + after)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", metavar="N,D,K", help="only this shape; prints, and writes nothing")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    shapes = SHAPES
    if options.shape:
        shapes = tuple(tuple(map(int, text.split(","))) for text in options.shape)
    rows = model_all(shapes, options.workers)
    print("Modelled, not measured: Trainium2, every assumption of benchmarks/cost_model/assumptions.py at its middle")
    print(table(rows))
    print("\n".join(goals(rows)))
    if not options.shape:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kernel.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        plot(rows, RESULTS / "kernel.png")
        plot_timeline(RESULTS / "timeline.png")
        write_readme(table(rows))


if __name__ == "__main__":
    main()
