// Device memory of the stand-in: pages that host code cannot touch.
//
// A block is protected (PROT_NONE) except while a Window on it is open: a device operation, or a kernel launch. Host
// code that reads or writes device memory without a copy ends with a segmentation fault, as reading HBM through a host
// pointer would.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

namespace neuron_standin {

constexpr c10::DeviceIndex kDeviceCount = 2;

struct MemoryStats {
  int64_t allocated;  // bytes requested by live tensors
  int64_t peak;       // highest value of allocated since the last reset
  int64_t reserved;   // bytes mapped, live and cached
};

c10::Allocator* allocator();
MemoryStats memory_stats(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void empty_cache();

// Gives a storage `bytes` bytes, keeping what it held.
void resize_storage(const c10::Storage& storage, size_t bytes);

// Keeps the block that holds `address` readable and writable; windows on one block nest and may be held by several
// threads.
class Window {
 public:
  explicit Window(const void* address);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

 private:
  void* block_;
};

}  // namespace neuron_standin
