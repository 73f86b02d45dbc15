// SPDX-License-Identifier: Apache-2.0
// A storage that stops being a page while it dies on another thread.
#include "pagoda/torch/page_storage.h"

#include <functional>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StorageImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/device/host/host_device.h"
#include "pagoda/torch/observer.h"

namespace pagoda::torch {
namespace {

class NoEngine final : public ObserverClient {
 public:
  std::string touch_failed(std::exception_ptr /*error*/) noexcept override { return {}; }
  void storage_exchanged(std::size_t /*parameter*/) override {}
  std::shared_ptr<device::Stream> consumer() override { return nullptr; }
};

class PageStorageDies : public ::testing::Test {
 protected:
  PageStorageDies() : tiers_(options()), pager_(tiers_, pager::Pager::Options{}) {}
  static pager::Tiers::Options options() {
    pager::Tiers::Options out;
    out.device = device::host::make_device({});
    out.device_budget = 32_KiB;
    out.host_budget = 16_MiB;
    return out;
  }

  /// Its page has become another storage's when the dying thread comes to say that it is dead.
  void expect_to_live(const std::function<void(PageStorage&)>& end) {
    const std::vector<std::byte> ones(4_KiB, std::byte{1});
    pager::Page& page = pager_.adopt("page", 2_KiB, 2, pager::Placement::Host, ones.data(),
                                     device::Direction::HostToHost);
    const Bytes used = tiers_.budget(pager::Tier::Host).used();
    at::Tensor tensor = at::ones({1024}), next = at::ones({1024});
    PageStorage first(tensor.storage(), pager_, client_, false);
    PageStorage second(next.storage(), pager_, client_, false);
    first.watch(page);
    pager_.set_binding(page, &first);
    c10::StorageImpl* const dying = tensor.storage().unsafeGetStorageImpl();
    c10::DataPtr data = dying->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU));
    tensor.reset();
    pager_.set_binding(page, nullptr);
    end(first);
    second.watch(page);
    pager_.set_binding(page, &second);
    data.clear();
    pager_.drop_dead_pages();
    EXPECT_EQ(tiers_.budget(pager::Tier::Host).used(), used) << "the page has been dropped";
    EXPECT_TRUE(first.gone() || !first.alive());
    pager_.set_binding(page, nullptr);
  }

  NoEngine client_;
  pager::Tiers tiers_;
  pager::Pager pager_;
};

TEST_F(PageStorageDies, ItsPageLivesOnWhereItIsDetached) {
  expect_to_live([](PageStorage& storage) { storage.detach("gone"); });
}

TEST_F(PageStorageDies, ItsPageLivesOnWhereItGetsBytesOfItsOwn) {
  expect_to_live([](PageStorage& storage) {
    storage.give_back(at::ones({1024}).storage().unsafeGetStorageImpl()->set_data_ptr(
        c10::DataPtr(nullptr, c10::kCPU)));
  });
}

TEST(PlainStorage, ThrowsWhileItIsShutAndKeepsItsValues) {
  const at::Tensor tensor = at::ones({2, 2});
  const at::Tensor view = tensor.t();
  PageStorage::shut_plain(*tensor.storage().unsafeGetStorageImpl(), "not in a capture");
  for (const at::Tensor& one : {tensor, view}) {
    EXPECT_THAT([&] { (void)one.add(1); },
                ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("not in a capture")));
  }
  PageStorage::open_plain(*tensor.storage().unsafeGetStorageImpl());
  EXPECT_EQ(view.sum().item<float>(), 4);
}

}  // namespace
}  // namespace pagoda::torch
