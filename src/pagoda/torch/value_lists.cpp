// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/value_lists.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/resolve_neg_native.h>
#include <ATen/ops/resolve_neg_ops.h>
#include <c10/util/Exception.h>

#include "pagoda/pager/pager.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {
namespace {

/// Whether Python asks for a tensor whose bytes are a page that no operator of this thread has.
bool is_unannounced_page(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr) return false;
  if (StorageTable::instance().empty() || !tensor.has_storage()) return false;
  const auto* key = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (StorageTable::instance().find(key) == nullptr) return false;
  TableUse use;
  use.enter();
  const PageStorage* storage = StorageTable::instance().find(key);
  return storage != nullptr && !pager::Pager::pinned_by_this_thread(*storage->page());
}

at::Tensor resolve_neg(const at::Tensor& self) {
  if (!self.is_neg() && self.is_cpu() && is_unannounced_page(self)) return self.clone();
  return at::native::resolve_neg(self);
}

/// torch warns of a kernel that takes another one's place.
struct NoWarning final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

bool put_in_place() {
  NoWarning silence;
  const c10::WarningUtils::WarningHandlerGuard quietly(&silence);
  // Never taken back: operators may run at exit.
  static_cast<void>(new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      {"aten::resolve_neg", ""}, c10::DispatchKey::CompositeImplicitAutograd,
      c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(resolve_neg)),
      c10::impl::CppSignature::make<at::_ops::resolve_neg::schema>(), nullptr,
      "pagoda: values of pages")));
  return true;
}

}  // namespace

void value_lists::install() {
  static const bool installed = put_in_place();
  static_cast<void>(installed);
}

}  // namespace pagoda::torch
