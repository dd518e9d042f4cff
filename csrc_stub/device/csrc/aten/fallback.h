// What ran on the device and what fell back to the CPU, by operator name.
#pragma once

#include <map>
#include <string>

namespace neuron_standin {

std::map<std::string, int64_t> fallback_counts();
void clear_fallback_counts();

}  // namespace neuron_standin
