// SPDX-License-Identifier: Apache-2.0
// A rank with a model of a few pages, driven call by call: for what ranks do together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pagoda/comm/world.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/runtime.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::engine {

/// One thread uses it.
class SmallRank {
 public:
  using Bits = std::vector<std::byte>;

  struct Options {
    Config config;
    kernels::Dtype dtype = kernels::Dtype::F32;
    Optimizer optimizer = Sgd{.lr = 0.5};
    std::vector<std::uint64_t> pages = {300, 5000, 9000, 1};
    std::vector<std::size_t> frozen;  // of the pages
    std::vector<std::size_t> blank;   // of the pages: never written
    int seed = 0;                     // of the values that it starts with
    bool strays = false;  // pages that are nobody's come first: others have other numbers then
    std::vector<BufferSpec> buffers;
  };

  SmallRank(Options options, std::shared_ptr<comm::World> world);
  SmallRank(const SmallRank&) = delete;
  SmallRank& operator=(const SmallRank&) = delete;

  /// How many pages have got rank 0's values. `watch`: what comes last in it.
  std::size_t attach(const std::function<void()>& watch = {});
  /// A micro-batch whose gradients follow from rank and number.
  void backward(int number, bool last = true);
  /// One of them; none if the page is frozen. Returns what it lives in.
  std::weak_ptr<void> contribute(std::size_t page, int number);
  void step();
  void join();
  /// Reads every page, and drops them.
  std::vector<Bits> release();
  /// An operator that adds a number to every byte of a page.
  void write(std::size_t page, int number);
  /// What operators see.
  std::vector<Bits> values();
  /// What it was made with.
  std::vector<Bits> initial() const;

  Runtime& runtime() { return *runtime_; }
  pager::Page& page(std::size_t i) { return *pages_[i]; }
  /// Where its bytes are, while it is resident and bound.
  std::byte* data(std::size_t i) { return places_[i].data(); }
  int rank() const { return rank_; }

 private:
  Options options_;
  int rank_;
  std::vector<pager::PlainBinding> places_;
  std::vector<pager::Page*> pages_;
  std::unique_ptr<Runtime> runtime_;
};

/// Runs `body` for every rank on a thread of its own; what each threw, or "" .
std::vector<std::string> run_ranks(const std::vector<std::shared_ptr<comm::World>>& worlds,
                                   const std::function<void(std::shared_ptr<comm::World>)>& body);
std::vector<std::string> run_ranks(int ranks,
                                   const std::function<void(std::shared_ptr<comm::World>)>& body);

/// What `call` throws, or "".
std::string thrown_by(const std::function<void()>& call);

}  // namespace pagoda::engine
