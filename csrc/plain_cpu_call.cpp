// The plain call of neuron::scatter_add_ and neuron::scatter_add on the CPU, without a step through Python.
//
// A plain call has strided CPU tensors of one dtype, no gradient or tangent to record and rows that exist: torch's own
// index_add_ after one pass over the index. Whatever else comes, torch's refusals included, goes to the Python kernel
// that this one stands before. So nothing here decides what a call means, and an installation without this file differs
// in time only.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>
#include <c10/core/AutogradState.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <limits>
#include <type_traits>

namespace {

// The place of each argument in both schemas.
enum Argument { INPUT, DIM, INDEX, SRC, ALPHA, UNIQUE_INDICES, LNC, COUNT };

// Whether every index is in [0, rows). Without a branch, so that the compiler vectorises it: the sign bit of v is set
// below 0, that of rows - 1 - v above the last row.
template <typename index_t>
bool all_in_range(const index_t* index, int64_t count, int64_t stride, int64_t rows) {
  using bits_t = std::make_unsigned_t<index_t>;
  const auto last = static_cast<bits_t>(std::min<int64_t>(rows - 1, std::numeric_limits<index_t>::max()));
  bits_t outside = 0;
  if (stride == 1) {
    for (int64_t k = 0; k < count; ++k) {
      const auto value = static_cast<bits_t>(index[k]);
      outside |= value | (last - value);
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      const auto value = static_cast<bits_t>(index[k * stride]);
      outside |= value | (last - value);
    }
  }
  return static_cast<index_t>(outside) >= 0;
}

bool in_range(const at::Tensor& index, int64_t rows) {
  if (index.scalar_type() == at::kLong) {
    return all_in_range(index.const_data_ptr<int64_t>(), index.numel(), index.stride(0), rows);
  }
  return all_in_range(index.const_data_ptr<int32_t>(), index.numel(), index.stride(0), rows);
}

bool has_tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

bool is_plain(c10::DispatchKeySet keys, c10::ArrayRef<c10::IValue> arguments) {
  if ((keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() != c10::DispatchKey::CPU) return false;
  if (!arguments[LNC].isNone()) return false;
  const at::Tensor& input = arguments[INPUT].toTensor();
  const at::Tensor& index = arguments[INDEX].toTensor();
  const at::Tensor& src = arguments[SRC].toTensor();
  for (const at::Tensor* tensor : {&input, &index, &src}) {
    if (!tensor->defined()) return false;
    if (!tensor->device().is_cpu() || tensor->layout() != at::kStrided) return false;
  }
  if (input.is_inference() || input.is_alias_of(src) || input.is_alias_of(index)) return false;
  if (src.scalar_type() != input.scalar_type()) return false;
  if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) return false;
  if (c10::AutogradState::get_tls_state().get_grad_mode() && (input.requires_grad() || src.requires_grad()))
    return false;
  if (has_tangent(input) || has_tangent(src)) return false;
  const int64_t dim = arguments[DIM].toInt();
  if (dim < -input.dim() || dim >= input.dim() || index.dim() != 1) return false;
  return in_range(index, input.size(dim));
}

class PlainCall : public c10::OperatorKernel {
 public:
  PlainCall(bool in_place, c10::SafeKernelFunction otherwise) : in_place_(in_place), otherwise_(std::move(otherwise)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, COUNT);
    if (is_plain(keys, arguments)) {
      try {
        at::Tensor result = call(arguments);
        torch::jit::drop(*stack, COUNT);
        stack->emplace_back(std::move(result));
        return;
      } catch (const c10::Error&) {
        // torch looks at its operands before it writes; the Python kernel says what is wrong in this operator's words.
      }
    }
    otherwise_.callBoxed(op, keys, stack);
  }

 private:
  at::Tensor call(c10::ArrayRef<c10::IValue> arguments) const {
    const at::Tensor& input = arguments[INPUT].toTensor();
    at::Tensor result = in_place_ ? input : input.clone(at::MemoryFormat::Contiguous);
    result.index_add_(arguments[DIM].toInt(), arguments[INDEX].toTensor(), arguments[SRC].toTensor(),
                      arguments[ALPHA].toScalar());
    return result;
  }

  bool in_place_;
  c10::SafeKernelFunction otherwise_;
};

// Register before the Python kernels that are there now; a second call does nothing.
PyObject* register_kernels(PyObject*, PyObject*) {
  // Never destroyed: at exit the dispatcher may be gone before this library.
  static torch::Library* library = nullptr;
  if (library != nullptr) Py_RETURN_NONE;
  try {
    library = new torch::Library(torch::Library::IMPL, "neuron", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
    for (const bool in_place : {true, false}) {
      const char* name = in_place ? "neuron::scatter_add_" : "neuron::scatter_add";
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
      auto otherwise = op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
      library->impl(
          name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<PlainCall>(in_place, std::move(otherwise))));
    }
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"register_kernels", register_kernels, METH_NOARGS, "Put the C++ kernels before the Python ones; once a process."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_plain_cpu_call", "See csrc/plain_cpu_call.cpp.", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__plain_cpu_call() {
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION);
  return module;
}
