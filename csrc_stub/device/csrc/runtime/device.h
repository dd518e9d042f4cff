// Devices of the stand-in: which one is current on a thread, their generators, and refusal in a forked child.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace neuron_standin {

c10::DeviceIndex current_device();
// Returns the device that was current. Throws c10::Error for a number that is no device.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

// Marks the device as used; throws in a child of a process that had used it, whose memory and queues belong to the
// parent.
void check_not_forked();

}  // namespace neuron_standin
