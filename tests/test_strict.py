"""What strict execution is there to catch in the simulator, and what a recording lists."""

import importlib

import pytest
import torch
from conftest import requires_neuron
from expecttest import assert_expected_inline

pytestmark = requires_neuron

nki = nisa = nl = None

EXAMPLE = torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32)
SEEDS = range(20)


@pytest.fixture(autouse=True, scope="module")
def names():
    global nki, nisa, nl
    import nki as package
    import nki.isa as isa
    import nki.language as language

    nki, nisa, nl = package, isa, language


def launch(body, *args, seed=0, lnc=1):
    """Launch out of order."""
    with nki.simulator.strict(seed):
        return nki.jit(body)[lnc](*args)


def sbuf(shape, dtype="float32"):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def load_index(index, start, rows):
    target = sbuf((rows, 1), nl.int32)
    nisa.dma_copy(dst=target, src=index.ap(pattern=[[1, rows], [1, 1]], offset=start))
    return target


def rows_of(tensor, target):
    columns = tensor.shape[1]
    return tensor.ap(pattern=[[columns, target.shape[0]], [1, columns]], vector_offset=target, indirect_dim=0)


def constant(shape, value):
    tile = sbuf(shape)
    nisa.memset(dst=tile, value=value)
    return tile


def add_two_groups(input, index, in_place):
    """Add 1 to the rows of the first half of index, then to those of the second half, by gather, add and store.

    Both groups store from one tile. in_place: they gather into it too, so that the second gather waits for the first store.
    """
    rows, columns = index.shape[0] // 2, input.shape[1]
    ones, total = constant((rows, columns), 1.0), sbuf((rows, columns))
    for group in range(2):
        target = load_index(index, group * rows, rows)
        old = total if in_place else sbuf((rows, columns))
        nisa.dma_copy(dst=old, src=rows_of(input, target), name=f"gather {group}")
        nisa.tensor_tensor(dst=total, data1=old, data2=ones, op=nl.add)
        nisa.dma_copy(dst=rows_of(input, target), src=total, name=f"store {group}")


TWO_GROUPS = torch.tensor([1, 3, 3, 0], dtype=torch.int32)


@pytest.mark.parametrize("seed", SEEDS)
def test_repeats_in_the_plain_kernel_are_a_hazard(seed):
    kernel = importlib.import_module("benchmarks.reference_kernels.gather_add_store").gather_add_store
    with nki.simulator.strict(seed), pytest.raises(nki.simulator.HazardError) as caught:
        kernel[1](torch.zeros(4, 1), EXAMPLE, torch.ones(6, 1))
    assert_expected_inline(
        str(caught.value),
        """\
dma_copy writes row 0 of an HBM tensor more than once, in an order that nothing determines; accepted are rows that differ""",
    )


def test_the_plain_kernel_passes_where_no_index_repeats():
    kernel = importlib.import_module("benchmarks.reference_kernels.gather_add_store").gather_add_store
    for seed in SEEDS:
        input = torch.zeros(300, 2)
        with nki.simulator.strict(seed):
            kernel[2](input, torch.randperm(300).to(torch.int32), torch.ones(300, 2))
        assert bool((input == 1).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gather_that_no_tile_orders_after_a_store_is_a_hazard(seed):
    message = (
        r"^dma_copy ('gather 1' and dma_copy 'store 0'|'store 0' and dma_copy 'gather 1') access the same row of an HBM "
        r"tensor \(row 3\), at least one of them writes, and nothing orders them; accepted is an order "
        r"through on-chip tiles$"
    )
    with pytest.raises(nki.simulator.HazardError, match=message):
        launch(add_two_groups, torch.zeros(4, 2), TWO_GROUPS, False, seed=seed)


def test_a_gather_into_the_tile_that_the_store_reads_is_ordered():
    for seed in SEEDS:
        input = torch.zeros(4, 2)
        launch(add_two_groups, input, TWO_GROUPS, True, seed=seed)
        assert input.tolist() == [[1, 1], [1, 1], [0, 0], [2, 2]]


def test_groups_without_a_common_row_need_no_order():
    index = torch.tensor([1, 3, 2, 0], dtype=torch.int32)
    for seed in SEEDS:
        input = torch.zeros(4, 2)
        launch(add_two_groups, input, index, False, seed=seed)
        assert bool((input == 1).all())


def test_different_columns_of_a_row_need_no_order_and_common_ones_do():
    def kernel(input, index, first_column):
        for column, value in ((0, 1.0), (first_column, 2.0)):
            target = load_index(index, 0, 1)
            view = input.ap(pattern=[[4, 1], [1, 2]], offset=column, vector_offset=target)
            nisa.dma_copy(dst=view, src=constant((1, 2), value))

    index = torch.tensor([1], dtype=torch.int32)
    for seed in SEEDS:
        input = torch.zeros(2, 4)
        launch(kernel, input, index, 2, seed=seed)
        assert input.tolist() == [[0, 0, 0, 0], [1, 1, 2, 2]]
        with pytest.raises(nki.simulator.HazardError):
            launch(kernel, torch.zeros(2, 4), index, 1, seed=seed)


def test_an_indirect_and_a_direct_access_that_meet_are_a_hazard():
    def kernel(input, index, row):
        nisa.dma_copy(dst=rows_of(input, load_index(index, 0, 1)), src=constant((1, 2), 1.0))
        nisa.dma_copy(dst=input[row : row + 1, :], src=constant((1, 2), 2.0))

    index = torch.tensor([1], dtype=torch.int32)
    for seed in SEEDS:
        input = torch.zeros(3, 2)
        launch(kernel, input, index, 2, seed=seed)
        assert input.tolist() == [[0, 0], [1, 1], [2, 2]]
        with pytest.raises(nki.simulator.HazardError):
            launch(kernel, torch.zeros(3, 2), index, 1, seed=seed)


def test_two_accesses_at_scalar_offsets_that_meet_are_a_hazard():
    def kernel(out, rows):
        for row in rows:
            view = out.ap(pattern=[[2, 1], [1, 2]], scalar_offset=nisa.register_alloc(row), indirect_dim=0)
            nisa.dma_copy(dst=view, src=constant((1, 2), float(row)))

    for seed in SEEDS:
        out = torch.zeros(3, 2)
        launch(kernel, out, [1, 2], seed=seed)
        assert out.tolist() == [[0, 0], [1, 1], [2, 2]]
        with pytest.raises(nki.simulator.HazardError):
            launch(kernel, torch.zeros(3, 2), [1, 1], seed=seed)


def test_two_programs_that_store_to_one_row_are_a_hazard():
    def kernel(input, index):
        value = float(nl.program_id(0))
        nisa.dma_copy(dst=rows_of(input, load_index(index, 0, 1)), src=constant((1, 2), value))

    with pytest.raises(nki.simulator.HazardError, match=r"\(row 1\)"):
        launch(kernel, torch.zeros(3, 2), torch.tensor([1], dtype=torch.int32), lnc=2)


def dma_compute_kernel(input, index):
    target = load_index(index, 0, index.shape[0])
    view = rows_of(input, target)
    nisa.dma_compute(dst=view, srcs=[view, constant((index.shape[0], 1), 1.0)], reduce_op=nl.add)


def test_a_repeated_index_in_one_dma_compute_is_refused():
    for seed in SEEDS:
        with pytest.raises(
            nki.simulator.HazardError, match=r"^dma_compute writes row 2 of an HBM tensor more than once"
        ):
            launch(dma_compute_kernel, torch.zeros(4, 1), torch.tensor([0, 2, 2], dtype=torch.int32), seed=seed)
        input = torch.zeros(4, 1)
        launch(dma_compute_kernel, input, torch.tensor([0, 2, 3], dtype=torch.int32), seed=seed)
        assert input.flatten().tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("buffer,tiles,free,limit", [
    ("psum", 8, 512, 16 * 1024),
    ("sbuf", 6, 8192, 192 * 1024),
])  # fmt: skip
def test_on_chip_memory_is_refused_above_its_size(buffer, tiles, free, limit):
    assert tiles * free * 4 == limit

    def kernel(count, extra):
        kept = [nl.ndarray((128, free), dtype=nl.float32, buffer=buffer) for _ in range(count)]
        kept += [nl.ndarray((1, 1), dtype=nl.int8, buffer=buffer) for _ in range(extra)]

    launch(kernel, tiles, 0)
    with pytest.raises(nisa.NkiValidationError) as caught:
        launch(kernel, tiles, 1)
    assert str(caught.value) == (
        f"{buffer} would hold {limit + 1} bytes a partition with this tensor of shape (1, 1) and dtype int8; accepted are "
        f"up to {limit}"
    )


def test_a_tile_that_nothing_initialised_shows_as_nan():
    def kernel(out, initialised):
        total = sbuf((2, 4))
        nisa.memset(dst=total[:, 0:4] if initialised else total[:, 0:3], value=1.0)
        nisa.tensor_tensor(dst=total, data1=total, data2=total, op=nl.add)
        nisa.dma_copy(dst=out, src=total)

    for seed in SEEDS:
        out = torch.zeros(2, 4)
        launch(kernel, out, False, seed=seed)
        assert bool((out[:, :3] == 2).all()) and bool(out[:, 3].isnan().all())
        launch(kernel, out, True, seed=seed)
        assert bool((out == 2).all())


def test_a_matmul_on_an_uninitialised_row_shows_as_nan():
    def kernel(out):
        weights, moving = constant((128, 2), 0.0), sbuf((128, 3))
        nisa.memset(dst=moving[0:96, :], value=1.0)
        total, result = nl.ndarray((2, 3), dtype=nl.float32, buffer=nl.psum), sbuf((2, 3))
        nisa.nc_matmul(dst=total, stationary=weights, moving=moving)
        nisa.tensor_copy(dst=result, src=total)
        nisa.dma_copy(dst=out, src=result)

    out = torch.zeros(2, 3)
    launch(kernel, out)
    assert bool(out.isnan().all())


def executed(body, *args, seed, monkeypatch):
    """Names of instructions in the order in which they ran."""
    from nki.isa import operands

    ran, count = [], operands.record

    def note(name):
        ran.append(name)
        count(name)

    with monkeypatch.context() as patch:
        patch.setattr(operands, "record", note)
        launch(body, *args, seed=seed)
    return tuple(ran)


def test_independent_instructions_run_in_orders_of_the_seed(monkeypatch):
    def kernel():
        nisa.memset(dst=sbuf((1, 1)), value=1.0)
        nisa.iota(sbuf((1, 1)), [[1, 1]])
        nisa.dma_copy(dst=sbuf((1, 1)), src=sbuf((1, 1)))

    orders = [executed(kernel, seed=seed, monkeypatch=monkeypatch) for seed in range(200)]
    assert all(sorted(order) == ["dma_copy", "iota", "memset"] for order in orders)
    assert len(set(orders)) == 6
    # DMAs complete late.
    assert sum(order[-1] == "dma_copy" for order in orders) > 100
    assert orders[:5] == [executed(kernel, seed=seed, monkeypatch=monkeypatch) for seed in range(5)]


def test_dependent_instructions_keep_their_order(monkeypatch):
    def kernel(out):
        tile, copy = sbuf((1, 1)), sbuf((1, 1))
        nisa.memset(dst=tile, value=3.0)
        nisa.tensor_copy(dst=copy, src=tile)
        nisa.iota(tile, [[1, 1]])
        nisa.dma_copy(dst=out, src=copy)

    for seed in SEEDS:
        out = torch.zeros(1, 1)
        order = executed(kernel, out, seed=seed, monkeypatch=monkeypatch)
        assert order.index("memset") < order.index("tensor_copy") < order.index("iota")
        assert order.index("tensor_copy") < order.index("dma_copy") and out.item() == 3


@pytest.mark.parametrize("by", ["partitions", "columns"])
def test_writes_of_parts_of_a_tile_wait_for_every_read_of_the_whole(by):
    def kernel(out):
        tile = sbuf((128, 2))
        nisa.memset(dst=tile, value=1.0)
        for copy in range(2):
            nisa.dma_copy(dst=out[128 * copy : 128 * (copy + 1), :], src=tile)
        for part in range(2):
            here = tile[64 * part : 64 * (part + 1), :] if by == "partitions" else tile[:, part : part + 1]
            nisa.memset(dst=here, value=2.0)
        nisa.dma_copy(dst=out[256:384, :], src=tile)

    for seed in range(60):
        out = torch.zeros(384, 2)
        launch(kernel, out, seed=seed)
        assert bool((out[:256] == 1).all()) and bool((out[256:] == 2).all())


def test_a_write_waits_for_every_read_before_it():
    def kernel(out):
        tile = constant((1, 1), 1.0)
        for copy in range(4):
            nisa.dma_copy(dst=out[copy : copy + 1, :], src=tile)
        nisa.memset(dst=tile, value=2.0)

    for seed in range(60):
        out = torch.zeros(4, 1)
        launch(kernel, out, seed=seed)
        assert bool((out == 1).all())


def test_unordered_stores_to_different_rows_give_one_result():
    def kernel(out, index):
        for row, value in enumerate((1.0, 2.0)):
            nisa.dma_copy(dst=rows_of(out, load_index(index, row, 1)), src=constant((1, 1), value))

    for seed in SEEDS:
        out = torch.zeros(3, 1)
        launch(kernel, out, torch.tensor([2, 0], dtype=torch.int32), seed=seed)
        assert out.flatten().tolist() == [2, 0, 1]


def test_a_register_is_loaded_after_what_its_tile_depends_on():
    def kernel(out, index):
        target = load_index(index, 0, 1)
        nisa.tensor_tensor(dst=target, data1=target, data2=target, op=nl.add)
        row = nisa.register_alloc()
        nisa.register_load(row, target)
        view = out.ap(pattern=[[1, 1], [1, 1]], scalar_offset=row, indirect_dim=0)
        nisa.dma_copy(dst=view, src=constant((1, 1), 5.0))

    for seed in SEEDS:
        out = torch.zeros(4, 1)
        launch(kernel, out, torch.tensor([1], dtype=torch.int32), seed=seed)
        assert out.flatten().tolist() == [0, 0, 5, 0]


def test_a_recording_lists_instructions_in_program_order_with_their_accesses():
    with nki.simulator.record() as recording:
        nki.jit(dma_compute_kernel)[1](torch.zeros(4, 1), torch.tensor([3, 0], dtype=torch.int32))
    assert [instruction.name for instruction in recording.instructions] == ["dma_copy", "memset", "dma_compute"]
    load, fill, compute = (instruction.accesses for instruction in recording.instructions)

    def facts(access):
        rows = None if access.rows is None else access.rows.tolist()
        return access.write, access.partitions, (access.start, access.stop), rows, access.dynamic

    assert [facts(access) for access in load] == [
        (True, (0, 2), (0, 4), None, False),
        (False, None, (0, 8), None, False),
    ]
    assert [facts(access) for access in fill] == [(True, (0, 2), (0, 4), None, False)]
    index_tile, ones = (False, (0, 2), (0, 4), None, False), (False, (0, 2), (0, 4), None, False)
    assert [facts(access) for access in compute] == [
        index_tile,
        index_tile,
        ones,
        (True, None, (0, 4), [3, 0], True),
        (False, None, (0, 4), [3, 0], True),
    ]
    assert compute[0].place is compute[1].place is load[0].place
    assert compute[2].place is fill[0].place is not load[0].place
    assert compute[3].place is compute[4].place


def test_a_recording_names_programs_and_labels():
    def kernel():
        nisa.memset(dst=sbuf((1, 1)), value=1.0, name="ones")

    with nki.simulator.record() as recording:
        nki.jit(kernel)[2]()
    assert sorted(instruction.program for instruction in recording.instructions) == [0, 1]
    assert [repr(instruction) for instruction in recording.instructions] == ["memset 'ones'"] * 2


def test_a_tile_of_a_hardware_loop_has_one_place_and_a_tile_of_an_unrolled_loop_has_many():
    def places(loop):
        def kernel():
            def body(_):
                nisa.memset(dst=sbuf((2, 1)), value=1.0)
                nisa.memset(dst=nl.ndarray((2, 1), dtype=nl.float32, buffer=nl.psum), value=1.0)

            loop(body)

        with nki.simulator.record() as recording:
            nki.jit(kernel)[1]()
        assert len(recording.instructions) == 6
        return [instruction.accesses[0].place for instruction in recording.instructions]

    hardware = places(lambda body: nl.fori_loop(0, 3, body))
    assert hardware == hardware[:2] * 3 and hardware[0] is not hardware[1]
    assert len(set(places(lambda body: [body(number) for number in range(3)]))) == 6


def test_an_iteration_writes_a_tile_after_the_iteration_before_has_read_it():
    def kernel(src, out):
        def body(row):
            tile = sbuf((1, 2))
            nisa.dma_copy(dst=tile, src=src.ap(pattern=[[2, 1], [1, 2]], scalar_offset=row, indirect_dim=0))
            nisa.dma_copy(dst=out.ap(pattern=[[2, 1], [1, 2]], scalar_offset=row, indirect_dim=0), src=tile)

        nl.fori_loop(0, 10, body)

    src = torch.arange(20.0).view(10, 2)
    for seed in SEEDS:
        out = torch.zeros(10, 2)
        launch(kernel, src, out, seed=seed)
        assert torch.equal(out, src)
