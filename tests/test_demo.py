"""The demo: what it shows, and that it fails when something disagrees.

`compare_gradient` is the check that the demo stands on, so it is tested with gradients that are wrong by known amounts.
"""

import contextlib
import pathlib
import re
import sys

import pytest
import torch

import torch_neuron_scatter

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo

    return demo


@pytest.fixture
def word_embeddings(demo):
    return sys.modules["word_embeddings"]


def test_plain_kernel_loses_repeated_rows_and_the_operator_does_not(neuron, demo, capsys):
    how, _ = demo.load_device()
    assert demo.repeated_indices(how) == []
    results = [line[line.index("[") :][:12] for line in capsys.readouterr().out.splitlines()[1:]]
    assert results == ["[2, 1, 3, 0]", "[1, 1, 1, 0]", "[2, 1, 3, 0]"]


def test_training_agrees_and_every_step_launches_the_kernel(neuron, demo, capsys):
    how, _ = demo.load_device()
    assert demo.word_embeddings(how, steps=4) == []
    shown = capsys.readouterr().out
    assert "launched 4 times in 4 steps" in shown
    assert "handed to torch     nothing" in shown


def test_exits_1_when_the_kernel_did_not_run(neuron, demo, monkeypatch, capsys):
    monkeypatch.setattr(torch_neuron_scatter, "routing", lambda **_: contextlib.nullcontext())
    assert demo.main(["--steps", "2"]) == 1
    assert "DISAGREES: 0 kernel launches in 2 steps" in capsys.readouterr().out


def test_exits_1_when_the_operator_is_wrong(neuron, demo, monkeypatch, capsys):
    monkeypatch.setattr(torch_neuron_scatter, "scatter_add_", lambda input, index, src: input)
    assert demo.main(["--steps", "1"]) == 1
    assert "device neuron gives [0, 0, 0, 0], not [2, 1, 3, 0]" in capsys.readouterr().out


@pytest.mark.parametrize("share", [1.5, float("nan")])
def test_exits_1_when_a_gradient_is_above_its_tolerance(neuron, demo, word_embeddings, monkeypatch, capsys, share):
    monkeypatch.setattr(word_embeddings, "compare_gradient", lambda *_: (1.0, share))
    assert demo.main(["--steps", "2"]) == 1
    assert "DISAGREES: the embedding's gradient is off by more than its tolerance" in capsys.readouterr().out


def test_without_a_device_it_says_what_it_skipped(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "load_device", lambda: (None, "Device neuron: absent."))
    assert demo.main([]) == 0
    shown = capsys.readouterr().out
    assert "2. Word embeddings: SKIPPED, there is no device neuron" in shown
    assert "Everything that ran agrees. Device neuron did not run." in shown
    assert "simulated" not in shown


def test_the_cpu_graph_holds_the_operator_once(demo, capsys):
    assert demo.compiled_graphs(None) == []
    assert capsys.readouterr().out.count("torch.ops.neuron.scatter_add") == 1


def test_the_graph_for_backend_neuron_holds_the_kernel_once(neuron, demo, capsys):
    assert demo.compiled_graphs("simulated") == []
    assert capsys.readouterr().out.count("nki_kernel_wrapper(") == 1


def test_a_graph_without_the_kernel_disagrees(neuron, demo, monkeypatch):
    monkeypatch.setattr(torch_neuron_scatter, "routing", lambda **_: contextlib.nullcontext())
    graph, name, result = demo.embedding_gradient()
    assert demo.show_graph(graph, name, result, "simulated") == [
        "the graph holds [], not one node of nki_kernel_wrapper"
    ]


def test_readme_example_prints_what_the_readme_says(neuron, capsys):
    readme = (EXAMPLES.parent / "README.md").read_text()
    code, _, rest = readme.partition("```python\n")[2].partition("```")
    said = re.search(r"prints `(.*)`", rest).group(1)
    try:
        exec(code, {})
    finally:
        torch_neuron_scatter.disable()
    assert capsys.readouterr().out.strip() == said


CONTEXT = torch.tensor([[5, 1, 5], [5, 2, 1]])


def gradients():
    """Gradients of 6 looked-up rows, and the table's as torch computes it on the CPU."""
    rows_gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return rows_gradient, torch.zeros(8, 4).index_add_(0, CONTEXT.flatten(), rows_gradient)


def test_gradient_of_another_order_of_additions_is_within_tolerance(word_embeddings):
    rows_gradient, weight_gradient = gradients()
    weight_gradient[5] = rows_gradient[3] + (rows_gradient[2] + rows_gradient[0])
    _, share = word_embeddings.compare_gradient(CONTEXT, rows_gradient.view(2, 3, 4), weight_gradient)
    assert share <= 1


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (5, lambda row: row * (1 + 2.0**-19)),
        (2, lambda row: torch.nextafter(row, torch.tensor(9.0))),
        (3, lambda row: row + 1e-30),
        (5, lambda row: row * float("nan")),
        (1, lambda row: row * float("inf")),
    ],
    ids=["repeated row", "row with one token", "row with no token", "nan", "inf"],
)
def test_wrong_gradient_is_above_tolerance(word_embeddings, row, change):
    rows_gradient, weight_gradient = gradients()
    weight_gradient[row] = change(weight_gradient[row])
    _, share = word_embeddings.compare_gradient(CONTEXT, rows_gradient, weight_gradient)
    assert not share <= 1


def test_one_lost_contribution_is_above_tolerance(word_embeddings):
    rows_gradient, weight_gradient = gradients()
    weight_gradient[5] -= rows_gradient[0]
    difference, share = word_embeddings.compare_gradient(CONTEXT, rows_gradient, weight_gradient)
    assert share > 1
    assert difference == pytest.approx(float(rows_gradient[0].abs().max()), rel=1e-5)


def test_text_has_a_few_thousand_words(word_embeddings):
    text = word_embeddings.read_text()
    assert 1000 < len(text.words) < 10000
    assert text.words[0] == "the"
    assert int(text.tokens.max()) == len(text.words) - 1
