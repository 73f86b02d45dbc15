// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/held_pages.h"

#include <cstdint>

#include <ATen/core/grad_mode.h>

#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/observer.h"
#include "pagoda/torch/page_storage.h"

namespace pagoda::torch {
namespace {

std::uint8_t touch_mode() {
  return static_cast<std::uint8_t>((at::GradMode::is_enabled() ? 1U : 0U) |
                                   (in_backward() ? 2U : 0U));
}

}  // namespace

thread_local bool Touching::here_ = false;

void Held::find_consumer() {
  consumer = client->consumer();
}

void Held::touch() {
  pin = pager->touch(all(), touch_mode(), consumer.get());
}

void note(PageStorage& storage, bool write, HeldPages& held) {
  Held* mine = nullptr;
  for (Held& one : held) {
    if (one.pager == &storage.pager()) mine = &one;
  }
  if (mine == nullptr) {
    held.push_back({&storage.pager(), &storage.client(), nullptr, {}, {}});
    mine = &held.back();
  }
  for (pager::Access& access : mine->accesses) {
    if (access.page != storage.page()) continue;
    access.write = access.write || write;
    return;
  }
  mine->accesses.push_back({storage.page(), write});
}

}  // namespace pagoda::torch
