"""A schedule's timeline as a picture."""

from . import dma_cost

_ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync")


def plot(schedule, simulation, path):
    """Write a PNG of one program: engines above, the 16 DMA engines below, time in us to the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = {name: [] for name in (*_ENGINES, *(f"DMA {engine}" for engine in range(dma_cost.ENGINES)))}
    for number, timing in enumerate(simulation.timings):
        if number in simulation.costs:
            bars[simulation.lane_of[number]].append((timing.start / 1e3, (timing.free - timing.start) / 1e3))
        elif simulation.dmas[number].trigger == "swdge":
            bars["gpsimd"].append((timing.start / 1e3, simulation.dmas[number].trigger_ns / 1e3))
    for piece in simulation.engines.pieces:
        bars[f"DMA {piece.engine}"].append((piece.start / 1e3, piece.duration / 1e3))

    figure = Figure(figsize=(14, 7), layout="constrained")
    axes = figure.add_subplot()
    for height, (name, spans) in enumerate(reversed(bars.items())):
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolors="tab:blue" if name.startswith("DMA") else "tab:orange")
    axes.set_yticks(range(len(bars)), reversed(bars))
    axes.set_xlim(0, schedule.total_us)
    axes.set_xlabel("modelled time, us")
    axes.set_title(f"Modelled: {schedule.total_us:.1f} us, bound by {schedule.bound_by}")
    FigureCanvasAgg(figure).print_png(path)
