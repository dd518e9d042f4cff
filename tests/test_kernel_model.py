"""The published modelled times: the README's table is made from them, they are what the kernels give now, and what they promise."""

import json

import pytest
import torch
from conftest import requires_neuron

from benchmarks import kernel_model

ROWS = [kernel_model.Row(**row) for row in json.loads((kernel_model.RESULTS / "kernel.json").read_text())]


def test_the_readme_shows_the_table_of_the_results():
    readme = (kernel_model.ROOT / "README.md").read_text()
    shown = readme.partition(kernel_model.MARKERS[0])[2].partition(kernel_model.MARKERS[1])[0]
    assert shown.strip() == kernel_model.table(ROWS).strip()


@requires_neuron
@pytest.mark.parametrize("shape,dtype", [((128, 512, 512), torch.bfloat16), ((1024, 1, 8192), torch.float32)])
@pytest.mark.parametrize("kernel", ["ours", "tile_combine"])
def test_the_results_are_what_the_kernels_give_now(kernel, shape, dtype):
    now = kernel_model.model_case((kernel, shape, dtype, "repeats", False))
    (kept,) = (
        row
        for row in ROWS
        if (row.kernel, (row.n, row.d, row.k), row.dtype, row.indices)
        == (kernel, shape, str(dtype).removeprefix("torch."), "repeats")
    )
    assert now.modelled_us == pytest.approx(kept.modelled_us, rel=1e-6)
    assert (now.instructions, now.dma_bytes, now.bound_by) == (kept.instructions, kept.dma_bytes, kept.bound_by)


def test_goals_that_are_met_stay_met():
    lines = kernel_model.goals(ROWS)
    mean, least = (float(lines[1].split(word)[1].split(" x")[0]) for word in ("up ", "least "))
    assert mean >= 2 and least >= 1.3
    assert not [line for line in lines if "of unique (MISSED" in line]
