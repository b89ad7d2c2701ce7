// Checks that a runtime's function table is the one declared in abi.h.
#pragma once

#include "ort/abi.h"

namespace bf16kit {

// Returns null if it is, else what is wrong with it. It creates an error, a tensor and a domain by the table and checks their
// known contents. Errors come first, because the other calls may return them. Entries that need a session or a running node
// (attributes, inputs, outputs, threads) must exist, but are not called.
const char* misfit(const abi::Api* api);

}  // namespace bf16kit
