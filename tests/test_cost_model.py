"""The cost model against times that can be worked out by hand from the documented figures. Results here are modelled."""

import importlib
import itertools
import json

import pytest
import torch
from conftest import requires_neuron

from benchmarks import cost_model
from benchmarks.cost_model import figures

pytestmark = requires_neuron

nki = nisa = nl = None
MIDDLE = cost_model.Settings.middle()
PEAK_GB_PER_S = figures.DMA_ENGINES.value * figures.DMA_BYTES_PER_NS.value


@pytest.fixture(autouse=True, scope="module")
def names():
    global nki, nisa, nl
    import nki as package
    import nki.isa as isa
    import nki.language as language

    nki, nisa, nl = package, isa, language


def record(body, *args, lnc=1):
    with cost_model.record() as recording:
        nki.jit(body)[lnc](*args)
    return recording


def modelled(body, *args, settings=MIDDLE, lnc=1):
    return cost_model.model(record(body, *args, lnc=lnc), settings)


def sbuf(shape, dtype="float32"):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def loads(tensor, count, buffers=4):
    """Load all of `tensor` `count` times, into as many tiles as `buffers`."""
    tiles = [sbuf(tensor.shape, tensor.dtype) for _ in range(buffers)]
    for number in range(count):
        nisa.dma_copy(dst=tiles[number % buffers], src=tensor)
    return tensor


@pytest.mark.parametrize("row_bytes,share", [(32768, 1.0), (2048, 0.813), (256, 0.103)])
def test_large_copies_reach_the_bandwidth_of_the_figure(row_bytes, share):
    count = 16 * 32768 // row_bytes
    buffers = min(128 * 1024 // row_bytes, 24)
    schedule = modelled(lambda tensor: loads(tensor, count, buffers), torch.zeros(128, row_bytes // 4))
    assert schedule.bytes["direct_read"] == schedule.dma_bytes == count * 128 * row_bytes
    assert schedule.dma_bytes / schedule.total_us / 1e3 == pytest.approx(PEAK_GB_PER_S * share, rel=0.05)
    assert schedule.bound_by == "dma"


def test_few_partitions_use_few_dma_engines():
    schedule = modelled(lambda tensor: loads(tensor, 32), torch.zeros(8, 8192))
    assert schedule.dma_bytes / schedule.total_us / 1e3 == pytest.approx(figures.DMA_BYTES_PER_NS.value, rel=0.05)
    assert schedule.busy_us["dma_busiest"] == pytest.approx(16 * schedule.busy_us["dma"])


@pytest.mark.parametrize("columns,step", [(512, 1), (512, 2)])
def test_a_strided_row_is_one_run_an_element(columns, step):
    def strided(tensor):
        nisa.dma_copy(dst=sbuf((128, columns)), src=tensor.ap(pattern=[[columns * step, 128], [step, columns]]))
        return tensor

    schedule = modelled(strided, torch.zeros(128, columns * step))
    runs, run_bytes = (1, columns * 4) if step == 1 else (columns, 4)
    engine_ns = 8 * runs * run_bytes / (figures.dma_efficiency(run_bytes) * figures.DMA_BYTES_PER_NS.value)
    assert schedule.total_us * 1e3 == pytest.approx(1300 + engine_ns + MIDDLE.dma_completion_ns)


@pytest.mark.parametrize("length", [2, 20])
def test_dependent_dmas_take_the_latency_each(length):
    def chain(tensor):
        tile = sbuf((1, 8))
        for number in range(length):
            if number % 2 == 0:
                nisa.dma_copy(dst=tile, src=tensor)
            else:
                nisa.dma_copy(dst=tensor, src=tile)
        return tensor

    schedule = modelled(chain, torch.zeros(1, 8))
    each = 1300 + 32 / (0.014 * 23) + MIDDLE.dma_completion_ns
    assert schedule.total_us * 1e3 == pytest.approx(length * each)
    assert schedule.longest_chain_us == pytest.approx(schedule.total_us)
    assert schedule.bound_by == "latency"
    assert len(schedule.critical_path) == length


def matmuls(count, dtype, onezero):
    def kernel(tensor):
        stationary, moving = sbuf((128, 128), dtype), sbuf((128, 512), dtype)
        nisa.memset(dst=stationary, value=1.0)
        nisa.memset(dst=moving, value=0.0)
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        for number in range(count):
            nisa.nc_matmul(
                dst=total,
                stationary=stationary,
                moving=moving,
                is_stationary_onezero=onezero,
                accumulate=number > 0,
            )
        return tensor

    return kernel


@pytest.mark.parametrize("dtype,onezero,cycles", [
    ("bfloat16", False, 512),
    ("bfloat16", True, 512),
    ("float32", False, 2048),
    ("float32", True, 1024),
])  # fmt: skip
def test_accumulating_matmuls_are_issued_back_to_back(dtype, onezero, cycles):
    few, many = (modelled(matmuls(count, dtype, onezero), torch.zeros(1)).total_us for count in (10, 110))
    assert (many - few) * 1e3 == pytest.approx(100 * cycles / 2.4)


def test_another_stationary_tile_is_loaded_behind_the_matmul_before():
    def alternate(tensor, count):
        tiles = [sbuf((128, 128), nl.bfloat16) for _ in range(2)]
        moving = sbuf((128, 64), nl.bfloat16)
        for tile in (*tiles, moving):
            nisa.memset(dst=tile, value=1.0)
        for number in range(count):
            total = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=total, stationary=tiles[number % 2], moving=moving)
        return tensor

    few, many = (modelled(lambda tensor, n=count: alternate(tensor, n), torch.zeros(1)).total_us for count in (10, 20))
    assert (many - few) * 1e3 == pytest.approx(10 * 64 / 2.4)


def vector(instruction, dtype, count, dependent=False):
    def kernel(tensor):
        first, second = sbuf((128, 512), dtype), sbuf((128, 512), dtype)
        nisa.memset(dst=first, value=1.0)
        nisa.memset(dst=second, value=1.0)
        for number in range(count):
            data, dst = (first, second) if number % 2 == 0 or not dependent else (second, first)
            if instruction == "tensor_scalar":
                nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=1.0)
            else:
                nisa.tensor_tensor(dst=dst, data1=data, data2=data, op=nl.multiply, engine=nisa.engine[instruction])
        return tensor

    return kernel


@pytest.mark.parametrize("instruction,dtype,dependent,ns", [
    ("tensor_scalar", "float32", False, (512 + 60) / 0.96),
    ("tensor_scalar", "float32", True, (512 + 100) / 0.96),
    ("tensor_scalar", "bfloat16", False, (512 / 4 + 60) / 0.96),
    ("vector", "float32", False, (2 * 512 + 60) / 0.96),
    ("vector", "bfloat16", False, (512 + 60) / 0.96),
    ("gpsimd", "float32", False, (2 * 2 * 512 + 60) / 1.2),
])  # fmt: skip
def test_element_wise_instructions_take_their_columns(instruction, dtype, dependent, ns):
    few, many = (modelled(vector(instruction, dtype, n, dependent), torch.zeros(1)).total_us for n in (10, 110))
    assert (many - few) * 1e3 == pytest.approx(100 * ns)


def gathers(count, in_place=False):
    """Gather 128 rows of the tensor `count` times; in_place: into one tile, and store them back."""

    def kernel(tensor, index):
        target = sbuf((128, 1), nl.int32)
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, 128], [1, 1]]))
        columns = tensor.shape[1]
        view = tensor.ap(pattern=[[columns, 128], [1, columns]], vector_offset=target, indirect_dim=0)
        for _ in range(count):
            tile = sbuf((128, columns))
            nisa.dma_copy(dst=tile, src=view, oob_mode=nisa.oob_mode.skip)
            if in_place:
                nisa.dma_copy(dst=view, src=tile, oob_mode=nisa.oob_mode.skip)
        return tensor

    return kernel


@pytest.mark.parametrize("ns", [1000.0, 3000.0])
def test_software_dge_bounds_gathers_of_tiny_rows(ns):
    settings = cost_model.Settings(swdge_ns_per_128_rows=ns)
    index = torch.arange(128, dtype=torch.int32)
    schedule = modelled(gathers(200), torch.zeros(128, 8), index, settings=settings)
    assert schedule.total_us == pytest.approx(200 * ns / 1e3, rel=0.05)
    assert schedule.bound_by == "gpsimd"


def test_skipped_rows_take_no_dma_engine():
    index = torch.full((128,), 2**31 - 1, dtype=torch.int32)
    index[:8] = torch.arange(8)
    schedule = modelled(gathers(10), torch.zeros(128, 512), index)
    assert schedule.bytes["indirect_read"] == 10 * 8 * 2048
    (program,) = schedule.programs
    gather = program.dmas[max(program.dmas)]
    assert gather.engine_ns.nonzero()[0].tolist() == [0]


def test_hardware_dge_bounds_dynamic_loads_of_tiny_rows():
    def kernel(tensor):
        def load(row):
            nisa.dma_copy(dst=sbuf((1, 8)), src=tensor.ap(pattern=[[8, 1], [1, 8]], scalar_offset=row, indirect_dim=0))

        # Bodies side by side have their own tiles, so that no load waits for the tile of the one before.
        for start in range(0, 400, 20):
            nl.fori_loop(start, start + 20, lambda row: [load(row) for _ in range(20)])
        return tensor

    schedule = modelled(kernel, torch.zeros(400, 8))
    assert schedule.instructions == 8000
    assert schedule.total_us == pytest.approx(8000 * 0.6 / 2, rel=0.05)
    assert schedule.bound_by == "hwdge"


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_read_modify_write_passes_its_rows(passes):
    def kernel(tensor, index):
        target, values = sbuf((128, 1), nl.int32), sbuf((128, 512))
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, 128], [1, 1]]))
        nisa.memset(dst=values, value=1.0)
        rows = tensor.ap(pattern=[[512, 128], [1, 512]], vector_offset=target, indirect_dim=0)
        nisa.dma_compute(dst=rows, srcs=[rows, values], reduce_op=nl.add)
        return tensor

    settings = cost_model.Settings(dma_compute_passes=passes)
    schedule = modelled(kernel, torch.zeros(128, 512), torch.arange(128, dtype=torch.int32), settings=settings)
    (program,) = schedule.programs
    dma = program.dmas[max(program.dmas)]
    assert dma.engine_ns == pytest.approx([passes * 8 * 2048 / (0.813 * 23)] * 16)
    assert schedule.bytes["rmw"] == 2 * 128 * 2048


def test_queues_take_turns_on_the_dma_engines():
    def kernel(tensor, index):
        target = sbuf((128, 1), nl.int32)
        nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, 128], [1, 1]]))
        loads(tensor, 10, 10)
        view = tensor.ap(pattern=[[2048, 128], [1, 2048]], vector_offset=target, indirect_dim=0)
        nisa.dma_copy(dst=sbuf((128, 2048)), src=view)
        return tensor

    schedule = modelled(kernel, torch.zeros(128, 2048), torch.arange(128, dtype=torch.int32))
    (program,) = schedule.programs
    numbers = [piece.number for piece in program.engines.pieces if piece.engine == 0]
    # The gather arrives while the first load is served, and has its turn before the other loads.
    assert numbers == [0, 1, 11, *range(2, 11)]


def rows_stored_then_gathered(tensor, stored, wanted):
    """Store to the rows of one index, then gather those of another."""
    tiles = [sbuf((128, 1), nl.int32) for _ in range(2)]
    for tile, index in zip(tiles, (stored, wanted), strict=True):
        nisa.dma_copy(dst=tile, src=index.ap(pattern=[[1, 128], [1, 1]]))
    views = [tensor.ap(pattern=[[8, 128], [1, 8]], vector_offset=tile, indirect_dim=0) for tile in tiles]
    values = sbuf((128, 8))
    nisa.memset(dst=values, value=1.0)
    nisa.dma_copy(dst=views[0], src=values)
    nisa.dma_copy(dst=sbuf((128, 8)), src=views[1])
    return tensor


@pytest.mark.parametrize("first_wanted,hbm_order,ordered", [(128, 0, False), (127, 0, True), (128, 1, True)])
def test_a_gather_waits_for_a_store_to_its_rows(first_wanted, hbm_order, ordered):
    stored = torch.arange(128, dtype=torch.int32)
    wanted = torch.arange(first_wanted, first_wanted + 128, dtype=torch.int32)
    settings = cost_model.Settings(hbm_order=hbm_order)
    schedule = modelled(rows_stored_then_gathered, torch.zeros(256, 8), stored, wanted, settings=settings)
    (program,) = schedule.programs
    store, gather = program.timings[-2:]
    assert (gather.start >= store.end) is ordered


def sample(kernel, lnc, rows=1000, columns=64, count=700, dtype=torch.bfloat16):
    module, name = kernel.rsplit(".", 1)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(rows, (count,), generator=generator, dtype=torch.int32)
    with cost_model.record() as recording:
        getattr(importlib.import_module(module), name)[lnc](
            torch.zeros(rows, columns, dtype=dtype), index, torch.ones(count, columns, dtype=dtype)
        )
    return recording


SAMPLES = [
    "torch_neuron_scatter.kernels.scatter_add.scatter_add",
    "benchmarks.reference_kernels.gather_add_store.gather_add_store",
]


def all_dependencies_hold(program):
    """Whether no step of a simulated program starts before what it depends on."""
    return all(
        program.timings[number].start >= program._available(earlier, number, kind == "data") - 1e-6
        for number, needs in enumerate(program.dependencies)
        for kind in ("data", "order")
        for earlier in getattr(needs, kind)
    )


@pytest.mark.parametrize("kernel", SAMPLES)
@pytest.mark.parametrize("lnc", [1, 2])
def test_the_total_respects_resources_and_dependencies(kernel, lnc):
    recording = sample(kernel, lnc)
    every = [settings for _, _, settings in cost_model.Settings.ends()]
    for settings in (MIDDLE, cost_model.Settings.all_at("low"), cost_model.Settings.all_at("high"), *every):
        schedule = cost_model.model(recording, settings)
        assert schedule.total_us >= max(schedule.busy_us.values())
        assert schedule.total_us >= schedule.longest_chain_us - 1e-6
        assert all(all_dependencies_hold(program) for program in schedule.programs)
        path = schedule.critical_path
        assert path[0].waits_for == "the start"
        assert all(before.until_us <= after.until_us for before, after in itertools.pairwise(path))
        assert path[-1].until_us == pytest.approx(schedule.total_us)
        assert sum(schedule.critical_time_us().values()) == pytest.approx(schedule.total_us)
        for program in schedule.programs:
            for lane in set(program.lane_of) if settings.issue_window == 1 else ():
                starts = [t.start for t, name in zip(program.timings, program.lane_of, strict=True) if name == lane]
                assert starts == sorted(starts)


def pairs_that_meet(steps):
    """(earlier, later, whether the later reads what the earlier wrote), by comparing all accesses with each other."""
    places = {}
    for number, step in enumerate(steps):
        for access in step.accesses:
            places.setdefault(id(access.place), []).append((number, access))
    for accesses in places.values():
        if not any(access.write for _, access in accesses):
            continue
        for (first, one), (second, other) in itertools.combinations(accesses, 2):
            if first != second and (one.write or other.write) and meet(one, other):
                yield first, second, one.write and not other.write


def meet(one, other):
    if one.start >= other.stop or other.start >= one.stop:
        return False
    if one.partitions is not None:
        return one.partitions[0] < other.partitions[1] and other.partitions[0] < one.partitions[1]
    return bool(set(one.rows.tolist()) & set(other.rows.tolist()))


@pytest.mark.parametrize("kernel", SAMPLES)
@pytest.mark.parametrize("rows,columns", [(1000, 64), (5, 64), (200, 2600)])
def test_no_dependency_is_lost_or_invented(kernel, rows, columns):
    (program,) = cost_model.model(sample(kernel, 1, rows, columns, count=400)).programs
    pairs = {(first, second): is_data for first, second, is_data in pairs_that_meet(program.steps)}
    before = []
    for number, needs in enumerate(program.dependencies):
        assert all((earlier, number) in pairs for earlier in needs.data | needs.order)
        before.append({earlier for first in needs.data | needs.order for earlier in (first, *before[first])})
    assert all(first in before[second] for first, second in pairs)
    for (first, second), is_data in pairs.items():
        if is_data and program.lane_of[first] != "tensor":
            assert program.timings[second].start >= program.timings[first].end - 1e-6


@pytest.mark.parametrize("kernel", SAMPLES)
def test_dma_engines_do_one_thing_at_a_time(kernel):
    (program,) = cost_model.model(sample(kernel, 1)).programs
    spans = {}
    for piece in program.engines.pieces:
        spans.setdefault(piece.engine, []).append((piece.start, piece.end))
    for pieces in spans.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(pieces)))


@pytest.mark.parametrize("kernel", SAMPLES)
def test_each_end_is_on_its_side_of_the_middle(kernel):
    recording = sample(kernel, 1)
    middle = cost_model.model(recording).total_us
    for name, end, settings in cost_model.Settings.ends():
        total = cost_model.model(recording, settings).total_us
        # A list schedule may get a little longer when one of its steps gets shorter.
        assert total <= middle * 1.02 if end == "low" else total >= middle * 0.98, (name, end)


def test_a_recording_of_the_simulator_gives_the_same_time():
    index = torch.arange(128, dtype=torch.int32)
    with nki.simulator.record() as recording:
        nki.jit(gathers(3, in_place=True))[1](torch.zeros(128, 8), index)
    mine = modelled(gathers(3, in_place=True), torch.zeros(128, 8), index)
    assert cost_model.model(recording).total_us == pytest.approx(mine.total_us)


def test_the_report_is_json():
    schedule = modelled(gathers(3), torch.zeros(128, 8), torch.arange(128, dtype=torch.int32))
    report = json.loads(schedule.to_json())
    assert report["total_us"] == schedule.total_us
    assert report["settings"] == {name: getattr(MIDDLE, name) for name in cost_model.ASSUMPTIONS}
    assert len(report["critical_path"]) == len(schedule.critical_path)


def test_the_timeline_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = modelled(gathers(3), torch.zeros(128, 8), torch.arange(128, dtype=torch.int32))
    schedule.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_an_empty_recording_is_refused():
    with cost_model.record() as recording:
        pass
    with pytest.raises(ValueError, match="no instructions"):
        cost_model.model(recording)
