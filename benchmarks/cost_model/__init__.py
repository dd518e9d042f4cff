"""A modelled time for an NKI kernel on one Trainium2 NeuronCore a program, from a recording of its simulated launch.

    from benchmarks import cost_model

    with cost_model.record() as recording:
        kernel[2](input, index, src)
    schedule = cost_model.model(recording)
    print(schedule.total_us, schedule.bound_by, schedule.critical_time_us())
    for name, end, settings in cost_model.Settings.ends():
        print(name, end, cost_model.model(recording, settings).total_us)

No number here was measured. figures.py has what the documentation says, assumptions.py what it leaves open. Left out:
the launch, instruction fetch, triggering a DMA on Sync Engine, and engines meeting at the end of a hardware loop's
iteration, since a recording does not say where one ends.
"""

from .assumptions import ASSUMPTIONS, Assumption, Settings
from .figures import Figure
from .report import Schedule, model
from .steps import record

__all__ = ["ASSUMPTIONS", "Assumption", "Figure", "Schedule", "Settings", "model", "record"]
