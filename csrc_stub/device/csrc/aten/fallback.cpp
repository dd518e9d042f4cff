// Boxed fallbacks for every operator the stand-in does not have, registered as TorchNeuron registers its own:
// PrivateUse1 runs on the CPU and is counted, AutogradPrivateUse1 redispatches below autograd without a gradient,
// AutocastPrivateUse1 falls through.

#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <mutex>

#include "../runtime/device.h"

namespace neuron_standin {
namespace {

std::mutex counts_mutex;
std::map<std::string, int64_t> counts;

// Random operators draw from the device's generator: its state goes to a CPU generator for the call and comes back.
struct BorrowedGenerator {
  at::Generator device;
  at::Generator cpu;
};

std::optional<BorrowedGenerator> borrow_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t position = 0; position < arguments.size(); ++position) {
    const auto& type = arguments[position].type();
    const bool optional = type->kind() == c10::TypeKind::OptionalType &&
                          type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (!optional && type->kind() != c10::TypeKind::GeneratorType) {
      continue;
    }
    c10::IValue& value = (*stack)[first + position];
    at::Generator device = value.isNone() ? default_generator(current_device()) : value.toGenerator();
    if (device.device().type() != c10::DeviceType::PrivateUse1) {
      return std::nullopt;
    }
    at::Generator cpu = at::detail::createCPUGenerator();
    cpu.set_state(device.get_state());
    value = cpu;
    return BorrowedGenerator{device, cpu};
  }
  return std::nullopt;
}

void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_not_forked();
  const std::string name = toString(op.operator_name());
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    ++counts[name];
  }
  const auto borrowed = borrow_generator(op, stack);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  if (borrowed) {
    at::Generator device = borrowed->device;
    device.set_state(borrowed->cpu.get_state());
  }
}

void below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>()); }

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&below_autograd>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

std::map<std::string, int64_t> fallback_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return counts;
}

void clear_fallback_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts.clear();
}

}  // namespace neuron_standin
