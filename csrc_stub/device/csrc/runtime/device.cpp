#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <atomic>
#include <vector>

#include "memory.h"

namespace neuron_standin {
namespace {

thread_local c10::DeviceIndex current = 0;
std::atomic<bool> used{false};
std::atomic<bool> forked{false};

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDeviceCount, "neuron device ", static_cast<int>(device),
              " does not exist; accepted are 0 to ", kDeviceCount - 1);
}

c10::Device neuron(c10::DeviceIndex device) { return {c10::DeviceType::PrivateUse1, device}; }

struct NeuronGenerator final : at::CPUGeneratorImpl {
  explicit NeuronGenerator(c10::DeviceIndex device) : at::CPUGeneratorImpl() {
    device_ = neuron(device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

// Execution is synchronous, so the one stream of a device is always idle and events need no state.
struct NeuronGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return neuron(exchange_device(device.index())); }
  c10::Device getDevice() const override { return neuron(current); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDeviceCount) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int token;
    *event = &token;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NeuronGuard)

struct NeuronHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device >= 0 && device < kDeviceCount ? exchange_device(device) : current;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<NeuronGenerator>(device < 0 ? current : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return neuron(current); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct Registration {
  Registration() {
    at::RegisterPrivateUse1HooksInterface(new NeuronHooks());
    pthread_atfork(nullptr, nullptr, [] { forked = forked || used; });
  }
} registration;

}  // namespace

c10::DeviceIndex current_device() { return current; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check_device(device);
  std::swap(current, device);
  return device;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  check_device(device);
  static std::vector<at::Generator>* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < kDeviceCount; ++index) {
      made->push_back(at::make_generator<NeuronGenerator>(index));
    }
    return made;
  }();
  return (*generators)[device];
}

void check_not_forked() {
  TORCH_CHECK(!forked,
              "Cannot re-initialize Neuron runtime in forked subprocess. "
              "To use Neuron with multiprocessing, use the 'spawn' start method");
  used = true;
}

}  // namespace neuron_standin
