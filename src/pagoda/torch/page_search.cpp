// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/page_search.h"

#include <exception>

#include "pagoda/torch/observer.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/sparse_parts.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_change.h"

namespace pagoda::torch {

/// Finds what `look` looks for, all of one moment.
template <class Look>
void PageSearch::run(const Look& look) {
  do {
    found_new_storage_ = false;
    began_ = TableChange::wait_for_none();
    look();
  } while (found_new_storage_ || !is_valid());
}

bool PageSearch::is_valid() const noexcept {
  return TableChange::none_since(began_);
}

void PageSearch::find(c10::ArrayRef<const c10::IValue> inputs, HeldPages& held) {
  run([&] {
    held.clear();
    for (const c10::IValue& input : inputs) add(input, false, held);
  });
  may_exchange_ = false;
}

void PageSearch::find(std::span<const AddedTensor> added, std::size_t first, std::uint64_t found,
                      HeldPages& held) {
  run([&] {
    if (began_ != found) first = 0;
    if (first == 0) held.clear();
    for (const auto& [tensor, write] : added.subspan(first)) add(tensor, write, held);
    if (found_new_storage_) first = 0;
  });
}

/// Every operator pays for this one.
void PageSearch::add(const c10::IValue& argument, bool write, HeldPages& held) {
  if (argument.isTensor()) {
    add(argument.toTensor(), write, held);
  } else if (argument.isList()) {
    for (const c10::IValue& element : argument.toListRef()) add(element, write, held);
  } else if (argument.isTuple()) {
    for (const c10::IValue& element : argument.toTupleRef().elements()) add(element, write, held);
  }
}

void PageSearch::add(const at::Tensor& tensor, bool write, HeldPages& held) {
  if (PageStorage* page = page_of(tensor)) note(*page, write, held);
  if (!tensor.defined() || tensor.has_storage()) return;
  for (const at::Tensor& part : sparse_parts(tensor)) {
    if (PageStorage* page = page_of(part)) note(*page, write, held);
  }
}

PageStorage* PageSearch::page_of(const at::Tensor& tensor) {
  const auto find = [&] {
    return StorageTable::instance().find(
        tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  };
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  PageStorage* page = find();
  if (page != nullptr && use_.enter()) page = find();
  // A parameter has hooks, also while it is frozen; what operators make under no_grad has nothing.
  if ((page != nullptr && !page->former()) || !may_exchange_ ||
      tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr || !tensor.is_leaf()) {
    return page;
  }
  readopt(tensor);
  page = find();
  return page != nullptr && use_.enter() ? find() : page;
}

/// A leaf whose storage is no parameter's page: if it is a parameter of an engine, it was given
/// another storage, which becomes its page.
void PageSearch::readopt(const at::Tensor& tensor) noexcept {
  const auto find = [&] { return ParameterTable::instance().find(tensor.unsafeGetTensorImpl()); };
  const AttachedParameter* parameter = find();
  if (parameter != nullptr && use_.enter()) parameter = find();
  if (parameter == nullptr) return;
  if (!unlocked_) unlocked_.emplace();
  try {
    parameter->client->storage_exchanged(parameter->number);
    found_new_storage_ = true;
  } catch (...) {
    parameter->client->touch_failed(std::current_exception());
  }
}

}  // namespace pagoda::torch
