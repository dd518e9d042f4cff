// Python bindings of the stand-in device; the public face is torch.neuron and torch_neuronx, not this module.

#include <torch/extension.h>

#include "aten/fallback.h"
#include "aten/host_view.h"
#include "runtime/device.h"
#include "runtime/memory.h"

namespace py = pybind11;
using namespace neuron_standin;

namespace {

// Context manager: `with host_view(tensors) as views` opens the tensors' memory to the simulator for the time of a
// launch.
class HostViews {
 public:
  explicit HostViews(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  std::vector<at::Tensor> enter() {
    std::vector<at::Tensor> views;
    for (const at::Tensor& tensor : tensors_) {
      open_.push_back(std::make_unique<HostView>(tensor));
      views.push_back(open_.back()->tensor());
    }
    return views;
  }

  void exit(const py::args&) { open_.clear(); }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::unique_ptr<HostView>> open_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", [] { return static_cast<int>(kDeviceCount); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("exchange_device", [](int device) { return static_cast<int>(exchange_device(device)); });
  m.def("check_not_forked", &check_not_forked);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("memory_stats", [](int device) {
    const MemoryStats stats = memory_stats(device);
    return py::dict(py::arg("allocated") = stats.allocated, py::arg("peak") = stats.peak,
                    py::arg("reserved") = stats.reserved);
  });
  m.def("reset_peak", [](int device) { reset_peak(device); });
  m.def("empty_cache", &empty_cache);
  m.def("fallback_counts", &fallback_counts);
  m.def("clear_fallback_counts", &clear_fallback_counts);
  py::class_<HostViews>(m, "host_view")
      .def(py::init<std::vector<at::Tensor>>())
      .def("__enter__", &HostViews::enter)
      .def("__exit__", &HostViews::exit);
}
