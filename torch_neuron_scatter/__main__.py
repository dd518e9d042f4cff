"""`python -m torch_neuron_scatter`: print the report of `torch_neuron_scatter.report`."""

import argparse
import sys

from . import report


def main(arguments=None):
    """Print the report; exit status 0, or 1 when the self-test fails or the stand-ins that were asked for cannot be loaded."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_neuron_scatter",
        description="Versions, the kernel chosen and why, and a self-test. Exit status 1 when the self-test fails.",
    )
    parser.add_argument("--stub", action="store_true", help="load the stand-ins for the Neuron packages first")
    if parser.parse_args(arguments).stub:
        from . import stub

        try:
            stub.install()
        except (ImportError, RuntimeError) as error:
            print(f"The stand-ins cannot be loaded: {error}", file=sys.stderr)
            return 1
    collected = report.collect()
    print(report.render(collected))
    return 0 if collected.passed else 1


if __name__ == "__main__":
    sys.exit(main())
