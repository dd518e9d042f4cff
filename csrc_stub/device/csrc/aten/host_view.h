// A device tensor seen as a CPU tensor while its block is open: how the stand-in's own operators and the simulator
// reach memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "../runtime/memory.h"

namespace neuron_standin {

// A CPU tensor over the same memory; valid to touch only while a Window on the block is open.
at::Tensor host_alias(const at::Tensor& tensor);

class HostView {
 public:
  explicit HostView(const at::Tensor& tensor)
      : window_(tensor.is_privateuseone() && tensor.numel() ? tensor.const_data_ptr() : nullptr),
        view_(tensor.is_privateuseone() ? host_alias(tensor) : tensor) {}
  const at::Tensor& tensor() const { return view_; }

 private:
  Window window_;
  at::Tensor view_;
};

}  // namespace neuron_standin
