// The domain `bf16kit` of a session, with the operators that its graph uses.
#pragma once

#include "ort/abi.h"

namespace bf16kit {

// Adds the domain to a session's options, with the operators whose names are in the entry `bf16kit.operators` of its
// configuration, each between commas; with all if there is no such entry. ONNX Runtime describes each operator again for each
// session, which takes 0.02 ms: all of them take longer than the rest of opening a small graph. Each runtime in the process has
// its own domains, one for each list, created on first use. They are never freed: they must outlive all sessions, and nothing
// tells when the last one ends. If the creation of one fails half way, nothing of it is kept.
abi::Status* add_domain(const abi::Api* api, abi::SessionOptions* options);

}  // namespace bf16kit
