// Whether the table that a runtime gives is the one declared in abi.h.
#pragma once

#include "ort/abi.h"

namespace bf16kit {

// Null when it is; else what is wrong with it. An error, a tensor and a domain are made through the table, and what each
// answers is known; errors come first, which the others may give. The entries that need a session or a node at work
// (attributes, inputs, outputs, threads) must be there, and are not called.
const char* misfit(const abi::Api* api);

}  // namespace bf16kit
