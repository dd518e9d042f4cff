"""The stand-in device: protected memory, its allocator, two devices, counted fallbacks, and what torch expects of a device."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from conftest import requires_neuron
from threads import run_in_threads

pytestmark = requires_neuron

SET_UP = "import torch, torch_neuron_scatter as tns; tns.stub.install()\n"


def run(code):
    return subprocess.run([sys.executable, "-c", SET_UP + code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("access", ["(ctypes.c_char * 4).from_address(address).raw", "ctypes.memset(address, 0, 4)"])
def test_host_code_that_touches_device_memory_faults(access):
    code = "import ctypes; address = torch.ones(4, device='neuron').data_ptr(); print('alive', flush=True)\n"
    result = run(code + access)
    assert "alive" in result.stdout
    assert result.returncode == -11, "no segmentation fault"


def test_memory_is_protected_again_after_a_launch():
    code = (
        "import ctypes; x = torch.zeros(4, 1, device='neuron'); i = torch.tensor([0], device='neuron')\n"
        "tns.scatter_add_(x, i, torch.ones(1, 1, device='neuron')); print(x[0].item(), flush=True)\n"
        "ctypes.memset(x.data_ptr(), 0, 4)"
    )
    result = run(code)
    assert result.stdout.strip() == "1.0" and result.returncode == -11


def test_a_freed_block_is_reused_and_poisoned():
    torch.neuron.empty_cache()  # else an older block of the same size comes first
    first = torch.ones(1000, device="neuron")
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device="neuron")
    assert second.data_ptr() == address
    assert second.cpu().isnan().all()
    assert (torch.empty(10, dtype=torch.int64, device="neuron").cpu() == -1).all()


def test_memory_figures():
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    held = torch.empty(1000, device="neuron")
    assert torch.neuron.memory_allocated() == before + 4000
    del held
    assert torch.neuron.memory_allocated() == before
    assert torch.neuron.max_memory_allocated() == before + 4000
    torch.neuron.empty_cache()
    assert torch.neuron.memory_reserved() >= torch.neuron.memory_allocated()


def test_two_devices():
    assert torch.neuron.device_count() == 2 and torch.neuron.is_available()
    with torch.neuron.device(1):
        assert torch.neuron.current_device() == 1
        x = torch.arange(3.0, device="neuron")
        assert x.device == torch.device("neuron:1")
    assert torch.neuron.current_device() == 0
    assert torch.equal(x.to("neuron:0").cpu(), x.cpu())
    torch.neuron.set_device(1)
    assert torch.neuron.current_device() == 1
    torch.neuron.set_device(0)
    torch.neuron.synchronize()
    with pytest.raises(RuntimeError, match="neuron device 2 does not exist"):
        torch.neuron.set_device(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_copies_of_every_layout_and_dtype(dtype):
    host = torch.arange(24).reshape(2, 3, 4).to(dtype)
    device = host.to("neuron")
    assert device.device.type == "neuron" and torch.equal(device.cpu(), host)
    assert torch.equal(device.transpose(0, 2).cpu(), host.transpose(0, 2))
    assert torch.equal(device[:, 1:, ::2].contiguous().cpu(), host[:, 1:, ::2])
    assert torch.equal(device.to(torch.float64 if not dtype.is_complex else torch.complex128).cpu().to(dtype), host)
    target = torch.zeros(4, 3, 2, dtype=dtype, device="neuron").permute(2, 1, 0)
    target.copy_(host)
    assert torch.equal(target.cpu(), host)
    expanded = torch.empty(2, 3, 4, dtype=dtype, device="neuron").copy_(host[:1])
    assert torch.equal(expanded.cpu(), host[:1].expand(2, 3, 4))
    assert torch.equal(device.view(6, 4).reshape(-1).clone().cpu(), host.reshape(-1))


def test_serialisation_deepcopy_and_printing():
    x = torch.arange(3.0, device="neuron")
    buffer = io.BytesIO()
    torch.save({"x": x, "view": x[1:]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert loaded["x"].device.type == "neuron" and torch.equal(loaded["view"].cpu(), x[1:].cpu())
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu")["x"].device.type == "cpu"
    twin = copy.deepcopy(x)
    twin.zero_()
    assert x.tolist() == [0, 1, 2]
    assert repr(x) == "tensor([0., 1., 2.], device='neuron:0')"
    assert x[2].item() == 2


def test_fallbacks_run_on_the_cpu_and_are_counted_by_name():
    import torch_neuronx

    x = torch.arange(6.0, device="neuron").view(2, 3)
    torch_neuronx.clear_op_tracking()
    total = x.sum(1)
    x.mul_(2)
    values, _ = x.max(1)
    out = torch.empty(2, 3, device="neuron")
    torch.add(x, 1, out=out)
    joined = torch.cat([x, x])
    assert total.tolist() == [3, 12] and values.tolist() == [4, 10]
    assert out[0].tolist() == [1, 3, 5] and joined.shape == (4, 3) and joined.device.type == "neuron"
    names = torch_neuronx.get_fallback_ops()
    for expected in ("aten::sum", "aten::mul", "aten::max", "aten::add", "aten::cat"):
        assert any(name.startswith(expected) for name in names), (expected, names)
    torch_neuronx.clear_op_tracking()
    assert torch_neuronx.get_fallback_ops() == []


def test_random_numbers_follow_the_devices_seed():
    torch.neuron.manual_seed(3)
    first = torch.rand(5, device="neuron").cpu()
    second = torch.rand(5, device="neuron").cpu()
    torch.neuron.manual_seed(3)
    assert torch.equal(torch.rand(5, device="neuron").cpu(), first) and not torch.equal(first, second)
    state = torch.neuron.get_rng_state()
    third = torch.rand(5, device="neuron").cpu()
    torch.neuron.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="neuron").cpu(), third)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device="neuron").cpu(), first)


def test_training_step_on_the_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    twin = copy.deepcopy(model).to("neuron")
    x = torch.randn(16, 4)
    for module, inputs in ((model, x), (twin, x.to("neuron"))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(inputs).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), theirs.detach())


def test_storage_grows_when_a_tensor_is_resized():
    x = torch.arange(4.0, device="neuron")
    x.resize_(8)
    assert x[:4].tolist() == [0, 1, 2, 3] and x.untyped_storage().nbytes() == 32


def test_fake_tensors_of_the_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 2, device="neuron")
        result = torch.ops.neuron.scatter_add(x, 0, torch.empty(3, dtype=torch.int64, device="neuron"), x[:3])
    assert result.shape == (4, 2) and result.device.type == "neuron"


def test_several_threads_at_once():
    def work(number):
        for _ in range(50):
            x = torch.full((64,), float(number), device=f"neuron:{number % 2}")
            assert (x + 1).sum().item() == 64 * (number + 1)

    run_in_threads(6, work)


def test_a_forked_child_is_refused_with_the_way_out():
    code = (
        "import os; torch.ones(2, device='neuron')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: torch.ones(2, device='neuron')\n"
        "    except RuntimeError as error: print(error, flush=True); os._exit(0)\n"
        "    os._exit(1)\n"
        "os.waitpid(pid, 0)"
    )
    result = run(code)
    assert "Cannot re-initialize Neuron runtime in forked subprocess" in result.stdout
    assert "'spawn'" in result.stdout


def test_a_child_forked_before_the_first_use_may_use_the_device():
    code = (
        "import os\npid = os.fork()\n"
        "if pid == 0:\n    print(torch.ones(2, device='neuron').sum().item(), flush=True); os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    assert run(code).stdout.strip() == "2.0"


def test_a_fallback_writes_into_a_strided_view_where_it_is():
    memory = torch.zeros(8, dtype=torch.int64, device="neuron")
    view = memory[1:7:3]
    view.index_add_(0, torch.tensor([0, 1], device="neuron"), torch.tensor([5, 7], device="neuron"))
    assert view.stride() == (3,)
    assert memory.tolist() == [0, 5, 0, 0, 7, 0, 0, 0]
    square = torch.zeros(3, 4, device="neuron")
    square.t().add_(torch.arange(12.0, device="neuron").reshape(4, 3))
    assert square.t().cpu().flatten().tolist() == list(range(12))
