"""What the documentation leaves open, as named numbers with two ends; `low` is the end that makes a kernel faster."""

import dataclasses

from . import figures


@dataclasses.dataclass(frozen=True)
class Assumption:
    """A number that no page states. low: the end that gives the shorter time."""

    low: float
    middle: float
    high: float
    unit: str
    why: str


ASSUMPTIONS = {
    "dma_engine_bytes_per_ns": Assumption(
        figures.DMA_THEORETICAL_BYTES_PER_NS.value,
        figures.DMA_BYTES_PER_NS.value,
        figures.DMA_BYTES_PER_NS.value,
        "B/ns/engine",
        "nki-dma-overview.rst states a theoretical 27.2 and a table of 23 for the same engine",
    ),
    "run_overhead": Assumption(
        0,
        1,
        1,
        "share",
        "the figure of bytes per partition: of each contiguous run (1), or of all that a DMA moves there (0)",
    ),
    "dma_completion_ns": Assumption(
        300,
        700,
        1000,
        "ns",
        "from a DMA's last byte to the waiting engine; with the documented 1300 ns, about 2 us for a small DMA",
    ),
    "swdge_ns_per_128_rows": Assumption(
        300,
        775,
        2000,
        "ns",
        "GpSimd writes 128 descriptors; no page gives its time. Middle: geometric mean. Half of it is fixed",
    ),
    "dma_compute_passes": Assumption(
        1,
        2,
        3,
        "x",
        "how often a DMA engine moves the payload of a read-modify-write: overlapped, read and write, or both and src",
    ),
    "onezero_speedup": Assumption(
        2, 2, 1, "x", "nc_matmul's page: is_*_onezero on a float32 operand 'could lead to 2x better performance'"
    ),
    "tensor_latency_cycles": Assumption(
        64, 128, 256, "cycles", "from a matmul's last moving column to its result in PSUM; the array is 128 deep"
    ),
    "vector_elements_per_cycle": Assumption(
        2,
        1,
        1,
        "elements/cycle/partition",
        "outside performance mode: trainium2_arch.rst's table has 256 elements a cycle for other dtypes, two a "
        "partition; its text and the cost model of trainium_inferentia2_arch.rst give such instructions no speedup",
    ),
    "gpsimd_cycles_per_element": Assumption(
        1, 2, 4, "cycles", "trainium_inferentia2_arch.rst: 128 lanes, and 'no rule-of-thumb to estimate execution cost'"
    ),
    "register_ns": Assumption(100, 200, 1000, "ns", "register_load and register_store; no page gives their time"),
    "semaphore_ns": Assumption(
        30, 60, 200, "ns", "one compute engine waits for another's result; a DMA's latency has its own"
    ),
    "issue_window": Assumption(
        16,
        1,
        1,
        "instructions",
        "how far ahead of an engine's oldest waiting instruction the compiler moved others up; 1: program order. In a "
        "hardware loop more than 1 takes a compiler that pipelines iterations",
    ),
    "hbm_order": Assumption(
        0,
        0,
        1,
        "switch",
        "accesses to one HBM tensor whose addresses the compiler does not know: ordered where their rows meet (0), or "
        "wherever their columns do (1)",
    ),
}


class _Ends:
    @classmethod
    def middle(cls):
        """Every assumption at its middle value."""
        return cls()

    @classmethod
    def ends(cls):
        """Yields (name, "low" or "high", Settings): one assumption moved, the others at their middle values."""
        for name, assumption in ASSUMPTIONS.items():
            for end in ("low", "high"):
                yield name, end, cls(**{name: getattr(assumption, end)})

    @classmethod
    def all_at(cls, end):
        """Every assumption at `end`, "low" (fastest) or "high" (slowest)."""
        return cls(**{name: getattr(assumption, end) for name, assumption in ASSUMPTIONS.items()})


Settings = dataclasses.make_dataclass(
    "Settings",
    [(name, float, dataclasses.field(default=assumption.middle)) for name, assumption in ASSUMPTIONS.items()],
    bases=(_Ends,),
    frozen=True,
)
Settings.__module__ = __name__
Settings.__doc__ = "A value for each assumption, by its name."
