// The domain `bf16kit` of a runtime, with all operators of this library.
#pragma once

#include "ort/abi.h"

namespace bf16kit {

// Adds the domain to a session's options. Each runtime in the process has its own domain, created on first use. It is never
// freed: it must outlive all sessions, and nothing tells when the last one ends. If its creation fails half way, nothing of it
// is kept.
abi::Status* add_domain(const abi::Api* api, abi::SessionOptions* options);

}  // namespace bf16kit
