#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"

namespace neuron_standin {
namespace {

struct Block {
  char* base;
  size_t mapped;     // whole pages
  size_t requested;  // bytes the tensor asked for
  c10::DeviceIndex device;
  int windows;
};

// Bytes of fresh memory: NaN in every float dtype, -1 in every integer.
constexpr int kPoison = 0xFF;

class Pool {
 public:
  Block* take(size_t bytes, c10::DeviceIndex device) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t mapped = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = reuse(mapped, device);
    if (block == nullptr) {
      void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, base != MAP_FAILED, "neuron stand-in: cannot map ", mapped,
                       " bytes of device memory");
      block = new Block{static_cast<char*>(base), mapped, 0, device, 0};
      stats_[device].reserved += static_cast<int64_t>(mapped);
    } else {
      mprotect(block->base, block->mapped, PROT_READ | PROT_WRITE);
    }
    std::memset(block->base, kPoison, block->mapped);
    mprotect(block->base, block->mapped, PROT_NONE);
    block->requested = bytes;
    live_[block->base] = block;
    MemoryStats& stats = stats_[device];
    stats.allocated += static_cast<int64_t>(bytes);
    stats.peak = std::max(stats.peak, stats.allocated);
    return block;
  }

  void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(block->base);
    stats_[block->device].allocated -= static_cast<int64_t>(block->requested);
    free_.emplace(block->mapped, block);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& entry : free_) {
      stats_[entry.second->device].reserved -= static_cast<int64_t>(entry.second->mapped);
      munmap(entry.second->base, entry.second->mapped);
      delete entry.second;
    }
    free_.clear();
  }

  Block* open(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = live_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == live_.begin()) {
      return nullptr;
    }
    Block* block = std::prev(after)->second;
    if (address >= block->base + block->mapped) {
      return nullptr;
    }
    if (block->windows++ == 0) {
      mprotect(block->base, block->mapped, PROT_READ | PROT_WRITE);
    }
    return block;
  }

  void close(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--block->windows == 0) {
      mprotect(block->base, block->mapped, PROT_NONE);
    }
  }

  MemoryStats stats(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }

  void reset_peak(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_[device].peak = stats_[device].allocated;
  }

 private:
  Block* reuse(size_t mapped, c10::DeviceIndex device) {
    auto [first, last] = free_.equal_range(mapped);
    for (auto entry = first; entry != last; ++entry) {
      if (entry->second->device == device) {
        Block* block = entry->second;
        free_.erase(entry);
        return block;
      }
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::map<char*, Block*> live_;
  std::multimap<size_t, Block*> free_;
  MemoryStats stats_[kDeviceCount] = {};
};

Pool& pool() {
  // Never destroyed: tensors may outlive static destruction.
  static Pool* instance = new Pool();
  return *instance;
}

void release(void* context) { pool().give(static_cast<Block*>(context)); }

struct NeuronAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_not_forked();
    const c10::Device device(c10::DeviceType::PrivateUse1, current_device());
    Block* block = pool().take(bytes, device.index());
    return {block->base, block, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    Window to(destination);
    Window from(source);
    std::memcpy(destination, source, count);
  }
};

NeuronAllocator neuron_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &neuron_allocator)

}  // namespace

c10::Allocator* allocator() { return &neuron_allocator; }
MemoryStats memory_stats(c10::DeviceIndex device) { return pool().stats(device); }
void reset_peak(c10::DeviceIndex device) { pool().reset_peak(device); }
void empty_cache() { pool().empty_cache(); }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DataPtr resized = neuron_allocator.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    neuron_allocator.copy_data(resized.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(resized));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

Window::Window(const void* address) : block_(nullptr) {
  check_not_forked();
  if (address != nullptr) {
    block_ = pool().open(address);
  }
}

Window::~Window() {
  if (block_ != nullptr) {
    pool().close(static_cast<Block*>(block_));
  }
}

}  // namespace neuron_standin
