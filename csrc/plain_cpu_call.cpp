// The plain call of neuron::scatter_add_ and neuron::scatter_add on the CPU, without a step through Python.
//
// A plain call has strided CPU tensors of one dtype, no gradient or tangent to record and rows that exist: torch's own
// index_add_ after one pass over the index. Whatever else comes, torch's refusals included, goes to the Python kernel
// that this one stands before. So nothing here decides what a call means, and an installation without this file differs
// in time only.

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <Python.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/python_variable.h>
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

bool is_plain(c10::DispatchKeySet keys, const at::Tensor& input, int64_t dim, const at::Tensor& index,
              const at::Tensor& src) {
  if ((keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() != c10::DispatchKey::CPU) return false;
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
  if (dim < -input.dim() || dim >= input.dim() || index.dim() != 1) return false;
  return in_range(index, input.size(dim));
}

class PlainCall : public c10::OperatorKernel {
 public:
  PlainCall(bool in_place, c10::SafeKernelFunction otherwise) : in_place_(in_place), otherwise_(std::move(otherwise)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, COUNT);
    if (arguments[LNC].isNone() && is_plain(keys, arguments[INPUT].toTensor(), arguments[DIM].toInt(),
                                            arguments[INDEX].toTensor(), arguments[SRC].toTensor())) {
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

// The plain call from Python without a step through torch.ops, whose reading of the arguments takes longer than that of
// an index of a few thousand rows. Nothing that would see the operator may be at work: subclass, mode, tracer,
// profiler.
PyObject* try_plain_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  enum Place { INPUT, DIM, INDEX, SRC, PLACES };
  if (count != PLACES || !PyLong_CheckExact(arguments[DIM])) Py_RETURN_FALSE;
  for (const Place place : {INPUT, INDEX, SRC}) {
    if (!THPVariable_CheckExact(arguments[place])) Py_RETURN_FALSE;
  }
  if (at::impl::torch_function_mode_enabled() || at::hasCallbacks()) Py_RETURN_FALSE;
  int overflow = 0;
  const int64_t dim = PyLong_AsLongLongAndOverflow(arguments[DIM], &overflow);
  if (overflow != 0) Py_RETURN_FALSE;
  const at::Tensor& input = THPVariable_Unpack(arguments[INPUT]);
  const at::Tensor& index = THPVariable_Unpack(arguments[INDEX]);
  const at::Tensor& src = THPVariable_Unpack(arguments[SRC]);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = ((input.key_set() | index.key_set() | src.key_set() | local.included_) - local.excluded_) -
                    c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  if (keys.highestPriorityTypeId() != c10::DispatchKey::AutogradCPU) Py_RETURN_FALSE;
  bool done = false;
  Py_BEGIN_ALLOW_THREADS;
  try {
    if (is_plain(keys, input, dim, index, src)) {
      input.index_add_(dim, index, src);
      done = true;
    }
  } catch (const std::exception&) {
    // As in PlainCall: nothing is written yet, and the operator has the words.
  }
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(done);
}

PyMethodDef methods[] = {
    {"try_plain_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(try_plain_call)), METH_FASTCALL,
     "(input, dim, index, src): accumulate in place and return True, or do nothing and return False."},
    {"register_kernels", register_kernels, METH_NOARGS, "Put the C++ kernels before the Python ones; once a process."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_plain_cpu_call", "See csrc/plain_cpu_call.cpp.", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__plain_cpu_call() {
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION);
  return module;
}
