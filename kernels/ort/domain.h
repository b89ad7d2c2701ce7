// The domain `bf16kit` of a runtime: all operators of this library, as sessions are given them.
#pragma once

#include "ort/abi.h"

namespace bf16kit {

// Adds the domain to what a session will be made with. There is one for each runtime in the process, made by it when it
// is first asked for: it must outlive all sessions, and nobody says when the last one has gone. When making it fails
// half way, nothing of it is kept.
abi::Status* add_domain(const abi::Api* api, abi::SessionOptions* options);

}  // namespace bf16kit
