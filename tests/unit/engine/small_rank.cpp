// SPDX-License-Identifier: Apache-2.0
#include "unit/engine/small_rank.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "pagoda/comm/thread_world.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/rounding_counter.h"

namespace pagoda::engine {
namespace {

using pager::Access;
using pager::Page;

/// Numbers between -1 and 1 that follow from `seed`.
SmallRank::Bits numbers(kernels::Dtype dtype, std::uint64_t count, std::uint64_t seed) {
  std::vector<float> values(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(kernels::mix64(kernels::mix64(seed) ^ i) % 2001) / 1000 - 1;
  }
  SmallRank::Bits out(count * kernels::element_size(dtype));
  if (dtype == kernels::Dtype::F32) {
    std::memcpy(out.data(), values.data(), out.size());
  } else {
    for (std::uint64_t i = 0; i < count; ++i) {  // bf16 by cutting: any bits will do
      std::memcpy(&out[2 * i], reinterpret_cast<const std::byte*>(&values[i]) + 2, 2);
    }
  }
  return out;
}

}  // namespace

SmallRank::SmallRank(Options options, std::shared_ptr<comm::World> world)
    : options_(std::move(options)),
      rank_(world->rank()),
      places_(options_.pages.size()),
      runtime_(std::make_unique<Runtime>(options_.config, std::move(world))) {
  const Bytes size = kernels::element_size(options_.dtype);
  const auto adopt = [&](const std::string& name, std::uint64_t elements, const Bits* bits) {
    return &runtime_->pager().adopt(name, elements, size, pager::Placement::Auto,
                                    bits == nullptr ? nullptr : bits->data(),
                                    device::Direction::HostToHost);
  };
  for (int i = 0; options_.strays && i < 3; ++i) adopt("stray", 17, nullptr);
  const std::vector<Bits> bits = initial();
  for (std::size_t p = 0; p < options_.pages.size(); ++p) {
    const bool blank = std::count(options_.blank.begin(), options_.blank.end(), p) > 0;
    pages_.push_back(
        adopt(fmt::format("page {}", p), options_.pages[p], blank ? nullptr : &bits[p]));
    runtime_->pager().set_binding(*pages_[p], &places_[p]);
  }
}

std::vector<SmallRank::Bits> SmallRank::initial() const {
  std::vector<Bits> out;
  for (std::size_t p = 0; p < options_.pages.size(); ++p) {
    out.push_back(numbers(options_.dtype, options_.pages[p],
                          static_cast<std::uint64_t>(options_.seed) * 100 + p));
    const bool blank = std::count(options_.blank.begin(), options_.blank.end(), p) > 0;
    if (blank) std::fill(out.back().begin(), out.back().end(), std::byte{});
  }
  return out;
}

std::size_t SmallRank::attach(const std::function<void()>& watch) {
  return runtime_
      ->attach(
          [&] {
            ModelSpec model;
            model.pages = pages_;
            model.groups = {options_.optimizer};
            model.buffers = options_.buffers;
            for (std::size_t p = 0; p < pages_.size(); ++p) {
              if (std::count(options_.frozen.begin(), options_.frozen.end(), p) > 0) continue;
              TrainedSpec spec;
              spec.page = pages_[p];
              spec.dtype = options_.dtype;
              spec.segments = {{{0, options_.pages[p]}, 0, 0}};
              spec.parameters = {{static_cast<std::uint32_t>(p), 0, 0, false, false}};
              model.trained.push_back(std::move(spec));
            }
            return model;
          },
          watch)
      .size();
}

void SmallRank::backward(int number, bool last) {
  runtime_->begin_backward(last);
  for (std::size_t p = pages_.size(); p-- > 0;) contribute(p, number);
  runtime_->end_backward();
}

std::weak_ptr<void> SmallRank::contribute(std::size_t page, int number) {
  optim::TrainedPage* trained = runtime_->trained(*pages_[page]);
  if (trained == nullptr) return {};
  const auto seed = static_cast<std::uint64_t>(1000 * (number + 1) + 100 * rank_) + page;
  auto bits = std::make_shared<Bits>(numbers(options_.dtype, options_.pages[page], seed));
  Contribution contribution;
  contribution.page = trained;
  contribution.present = {true};
  contribution.data = bits->data();
  contribution.keep = std::move(bits);
  std::weak_ptr<void> out = contribution.keep;
  runtime_->contribute(std::move(contribution));
  return out;
}

void SmallRank::step() {
  runtime_->step([](Page&) {});
}

void SmallRank::join() {
  runtime_->join([](Page&) {});
}

void SmallRank::write(std::size_t page, int number) {
  const Access access{pages_[page], true};
  const pager::Pin pin = runtime_->pager().touch({&access, 1}, 1, nullptr);
  for (Bytes i = 0; i < pages_[page]->bytes(); ++i) {
    places_[page].data()[i] =
        static_cast<std::byte>(std::to_integer<int>(places_[page].data()[i]) + number);
  }
}

std::vector<SmallRank::Bits> SmallRank::values() {
  std::vector<Bits> out;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    const Access access{pages_[p], false};
    const pager::Pin pin = runtime_->pager().touch({&access, 1}, 1, nullptr);
    out.emplace_back(places_[p].data(), places_[p].data() + pages_[p]->bytes());
  }
  return out;
}

std::vector<SmallRank::Bits> SmallRank::release() {
  std::vector<Bits> out;
  runtime_->release([&] { out = values(); });
  for (Page* page : pages_) {
    runtime_->pager().set_binding(*page, nullptr);
    runtime_->drop(*page);
  }
  pages_.clear();
  return out;
}

std::vector<std::string> run_ranks(const std::vector<std::shared_ptr<comm::World>>& worlds,
                                   const std::function<void(std::shared_ptr<comm::World>)>& body) {
  std::vector<std::string> out(worlds.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < worlds.size(); ++r) {
      threads.emplace_back([&, r] { out[r] = thrown_by([&] { body(worlds[r]); }); });
    }
  }
  return out;
}

std::vector<std::string> run_ranks(int ranks,
                                   const std::function<void(std::shared_ptr<comm::World>)>& body) {
  return run_ranks(comm::make_thread_worlds(ranks), body);
}

std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace pagoda::engine
