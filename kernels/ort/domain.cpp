#include "ort/domain.h"

#include <mutex>
#include <new>

#include "ort/operators.h"
#include "ort/status.h"

namespace bf16kit {

using namespace abi;

namespace {

// A runtime, known by the address of its table, and its domain. A runtime cannot use a domain that another one made: the layouts
// may differ.
struct Known {
  const Api* api;
  Domain* domain;
  Known* next;
};

Status* fill(const Api* api, Domain* domain) {
  for (size_t i = 0; i < kOperators; ++i) {
    BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kCustomOpDomainAdd, domain, operator_at(i)));
  }
  return nullptr;
}

Status* make(const Api* api, Domain** made) {
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kCreateCustomOpDomain, static_cast<const char*>("bf16kit"), made));
  Status* status = fill(api, *made);
  if (status != nullptr) call<void>(api, kReleaseCustomOpDomain, *made);
  return status;
}

}  // namespace

Status* add_domain(const Api* api, SessionOptions* options) {
  static std::mutex mutex;
  static Known* all = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  Known* known = all;
  while (known != nullptr && known->api != api) known = known->next;
  if (known == nullptr) {
    Domain* domain = nullptr;
    BF16KIT_RETURN_IF_ERROR(make(api, &domain));
    known = new (std::nothrow) Known{api, domain, all};
    if (known == nullptr) {
      call<void>(api, kReleaseCustomOpDomain, domain);
      return error(api, kFail, "out of memory");
    }
    all = known;
  }
  return call<Status*>(api, kAddCustomOpDomain, options, known->domain);
}

}  // namespace bf16kit
