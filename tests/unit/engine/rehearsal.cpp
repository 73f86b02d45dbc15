// SPDX-License-Identifier: Apache-2.0
#include "unit/engine/rehearsal.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/gradient_norm.h"
#include "pagoda/kernels/rounding_counter.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::engine {
namespace {

using kernels::Dtype;
using pager::Access;
using pager::Page;
using Bits = std::vector<std::byte>;

float made_up(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  const std::uint64_t bits = kernels::mix64(kernels::mix64(kernels::mix64(a) ^ b) ^ c);
  return static_cast<float>(static_cast<std::int64_t>(bits >> 40U) - (1 << 23)) / 0x1p23F;
}

Bits in_type(Dtype dtype, const std::vector<float>& values) {
  Bits out(values.size() * kernels::element_size(dtype));
  kernels::cast(values.data(), kernels::Elements{dtype, out.data()}, values.size());
  return out;
}

std::vector<float> in_floats(Dtype dtype, const Bits& bits) {
  std::vector<float> out(bits.size() / kernels::element_size(dtype));
  kernels::cast(kernels::ConstElements{dtype, bits.data()}, out.data(), out.size());
  return out;
}

Bits initial(const Rehearsal& r, std::size_t page) {
  std::vector<float> values(r.pages[page]);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = made_up(1, page, i);
  return in_type(r.dtype, values);
}

bool is_frozen(const Rehearsal& r, std::size_t page) {
  return std::find(r.frozen.begin(), r.frozen.end(), page) != r.frozen.end();
}

/// Whether a gradient of the page that comes in this step is used.
bool is_trained(const Rehearsal& r, int step, std::size_t page) {
  if (!is_frozen(r, page)) return true;
  if (r.refused && r.refused(step)) return false;
  for (int rank = 0; rank < r.ranks; ++rank) {
    bool thawed = false;
    for (int micro = 0; micro <= r.micro_batches; ++micro) {
      thawed = thawed || r.thawed(rank, step, micro, page);
    }
    if (!thawed) return false;
  }
  return true;
}

bool contributes(const Rehearsal& r, int rank, int step, int micro, std::size_t page) {
  if (rank == r.idle_rank) return false;
  if (is_frozen(r, page) && !r.thawed(rank, step, micro, page)) return false;
  if (r.all_contribute) return true;
  if ((page + static_cast<std::size_t>(step)) % 4 == 3) return false;  // nobody has it
  return (static_cast<std::size_t>(rank + step + micro) + page) % 3 != 0;
}

/// What a step has of values that come over and over.
template <class T>
T of_step(const std::vector<T>& values, int step, T without_any) {
  return values.empty() ? without_any : values[static_cast<std::size_t>(step) % values.size()];
}

Bits gradient(const Rehearsal& r, int rank, int step, int micro, std::size_t page) {
  std::vector<float> values(r.pages[page]);
  const auto seed = static_cast<std::uint64_t>((rank * 100 + step) * 100 + micro);
  const float size = of_step(r.gradient_sizes, step, 1.0F);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = size * made_up(2 + seed, page, i);
  return in_type(r.dtype, values);
}

double learning_rate(const Rehearsal& r, int step) {
  return of_step(r.learning_rates, step, optim::learning_rate(r.optimizer));
}

bool is_written(const Rehearsal& r, int step, std::size_t page) {
  return r.writes && step > 0 && (page + static_cast<std::size_t>(step)) % 2 == 0;
}

/// What user code makes of a page before `step`: every third element is another.
void write_to(int step, Dtype dtype, std::span<std::byte> bytes) {
  const Bits other = in_type(dtype, {0.25F * static_cast<float>(step)});
  for (std::size_t at = 0; at < bytes.size(); at += 3 * other.size()) {
    std::memcpy(bytes.data() + at, other.data(), other.size());
  }
}

/// One page as plain arrays.
struct Plain {
  Bits value;
  std::vector<float> master;
  Bits momentum, variance;
  Bits sum;
  bool filled = false;
  std::uint64_t updates = 0;
};

/// What every page holds during the forward of each step: [step][page]; one more for the end.
std::vector<std::vector<Bits>> expected(const Rehearsal& r) {
  const bool fp32_sums = r.config.gradient_dtype == GradientType::Fp32;
  const Dtype sum_type = fp32_sums ? Dtype::F32 : r.dtype;
  const Dtype moments = r.config.moments == MomentType::Bf16 ? Dtype::BF16 : Dtype::F32;
  std::vector<Plain> pages(r.pages.size());
  for (std::size_t p = 0; p < pages.size(); ++p) {
    pages[p].value = initial(r, p);
    pages[p].master = in_floats(r.dtype, pages[p].value);
    const std::size_t moment_bytes = r.pages[p] * kernels::element_size(moments);
    if (optim::has_momentum(r.optimizer)) pages[p].momentum.resize(moment_bytes);
    if (optim::has_variance(r.optimizer)) pages[p].variance.resize(moment_bytes);
    pages[p].sum.resize(r.pages[p] * kernels::element_size(sum_type));
  }
  ThreadPool pool(1, "expected");
  const float mean = 1.0F / static_cast<float>(r.ranks);
  std::vector<std::vector<Bits>> out;
  for (int step = 0; step <= r.steps; ++step) {
    auto& now = out.emplace_back();
    for (std::size_t p = 0; p < pages.size(); ++p) {
      Plain& page = pages[p];
      if (is_written(r, step, p)) {
        const Bits before = page.value;
        write_to(step, r.dtype, page.value);
        const std::vector<float> fresh = in_floats(r.dtype, page.value);
        const std::size_t size = kernels::element_size(r.dtype);
        for (std::size_t i = 0; i < fresh.size(); ++i) {
          if (std::memcmp(&before[i * size], &page.value[i * size], size) != 0) {
            page.master[i] = fresh[i];
          }
        }
      }
      now.push_back(page.value);
    }
    if (step == r.steps) break;
    double squares = 0;
    for (std::size_t p = 0; p < pages.size(); ++p) {
      Plain& page = pages[p];
      page.filled = false;
      for (int micro = 0; micro < r.micro_batches; ++micro) {
        std::vector<float> total(r.pages[p], 0.0F);
        bool any = false;
        for (int rank = 0; rank < r.ranks; ++rank) {
          if (!contributes(r, rank, step, micro, p) || !is_trained(r, step, p)) continue;
          const std::vector<float> g = in_floats(r.dtype, gradient(r, rank, step, micro, p));
          for (std::size_t i = 0; i < g.size(); ++i) total[i] = any ? total[i] + g[i] : g[i];
          any = true;
        }
        if (!any) continue;
        for (float& value : total) value *= mean;
        if (page.filled) {
          const std::vector<float> before = in_floats(sum_type, page.sum);
          for (std::size_t i = 0; i < total.size(); ++i) total[i] = before[i] + total[i];
        }
        page.sum = in_type(sum_type, total);
        page.filled = true;
      }
      if (page.filled) {
        squares += kernels::sum_of_squares(kernels::ConstElements{sum_type, page.sum.data()},
                                           r.pages[p], 1);
      }
    }
    double factor = 1;
    if (r.config.clip > 0 && std::isfinite(squares)) {
      factor = std::min(1.0, r.config.clip / (std::sqrt(squares) + 1e-6));
    }
    Optimizer optimizer = r.optimizer;
    optim::set_learning_rate(optimizer, learning_rate(r, step));
    for (std::size_t p = 0; p < pages.size(); ++p) {
      Plain& page = pages[p];
      if (!page.filled) continue;
      kernels::OptimizerShard shard;
      shard.count = r.pages[p];
      shard.grad = kernels::ConstElements{sum_type, page.sum.data()};
      shard.master = page.master.data();
      if (r.dtype != Dtype::F32) shard.param = kernels::Elements{r.dtype, page.value.data()};
      if (!page.momentum.empty()) shard.momentum = kernels::Elements{moments, page.momentum.data()};
      if (!page.variance.empty()) shard.variance = kernels::Elements{moments, page.variance.data()};
      const std::uint64_t seed = kernels::mix64(kernels::mix64(r.config.seed) ^ p);
      optim::apply(optimizer, {++page.updates, factor, seed}, shard, pool);
      if (r.dtype == Dtype::F32) page.value = in_type(Dtype::F32, page.master);
    }
  }
  return out;
}

Config config_of(const Rehearsal& r, int rank) {
  Config out = r.config;
  if (r.configure) r.configure(rank, out);
  return out;
}

/// One rank.
class Rank {
 public:
  Rank(const Rehearsal& r, std::shared_ptr<comm::World> world,
       const std::vector<std::vector<Bits>>& right)
      : r_(r),
        right_(right),
        rank_(world->rank()),
        places_(r.pages.size()),
        agreed_(r.frozen.size()),
        runtime_(config_of(r, rank_), std::move(world)) {
    const Bytes size = kernels::element_size(r.dtype);
    std::vector<TrainedSpec> trained;
    for (std::size_t p = 0; p < r.pages.size(); ++p) {
      const Bits bits = initial(r, p);
      Page& page = runtime_.pager().adopt(fmt::format("page {}", p), r.pages[p], size,
                                          pager::Placement::Host, bits.data(),
                                          device::Direction::HostToHost);
      runtime_.pager().set_binding(page, &places_[p]);
      pages_.push_back(&page);
      TrainedSpec spec;
      spec.page = &page;
      spec.dtype = r.dtype;
      spec.segments = {{{0, r.pages[p]}, 0, 0}};
      spec.parameters = {{static_cast<std::uint32_t>(p), 0, 0, false, false}};
      trained.push_back(std::move(spec));
    }
    std::vector<FrozenSpec> frozen;
    for (const std::size_t p : r.frozen) frozen.push_back({p, 0, fmt::format("page {}", p), {}});
    runtime_.attach(pages_, std::move(trained), {r.optimizer}, frozen);
  }

  Runtime& runtime() { return runtime_; }

  void train() {
    for (int step = 0; step < r_.steps; ++step) {
      write(step);
      runtime_.set_learning_rate(0, learning_rate(r_, step));
      for (int micro = 0; micro < r_.micro_batches; ++micro) {
        if (r_.looks_up) look_up(step, micro);
        forward(step);
        if (rank_ != r_.idle_rank) backward(step, micro);
      }
      if (r_.before_step) r_.before_step(step, runtime_, pages_);
      if (r_.late_from >= 0 && step >= r_.late_from) {
        if (r_.looks_up) look_up(step, 9);
        forward(step);
      }
      thaw(step, r_.micro_batches);
      if (r_.refused && r_.refused(step)) {
        expect_refusal();
        runtime_.set_thawed({});
      }
      runtime_.step([](Page&) {});
      for (std::size_t i = 0; i < agreed_.size(); ++i) agreed_[i] = runtime_.is_trained(i);
    }
    write(r_.steps);
    forward(r_.steps);
    runtime_.finish();
    forward(r_.steps);
  }

 private:
  void thaw(int step, int micro) {
    FrozenSet now;
    for (std::size_t i = 0; i < r_.frozen.size(); ++i) {
      if (!agreed_[i] && r_.thawed(rank_, step, micro, r_.frozen[i])) now.insert(i);
    }
    runtime_.set_thawed(now);
  }

  void expect_refusal() {
    try {
      runtime_.step([](Page&) {});
    } catch (const ThawRefused&) {
      return;
    }
    throw EngineError("what was thawed was not refused");
  }

  void write(int step) {
    for (std::size_t p = 0; p < pages_.size(); ++p) {
      if (!is_written(r_, step, p)) continue;
      const Access access{pages_[p], true};
      const pager::Pin pin = runtime_.pager().touch({&access, 1}, 1, nullptr);
      write_to(step, r_.dtype, {places_[p].data(), pages_[p]->bytes()});
    }
  }

  /// Operators of one or two pages, by several threads that start at different ones.
  void forward(int step) {
    std::exception_ptr first;
    std::mutex mutex;
    const auto run = [&](unsigned thread) {
      try {
        if (r_.looks_up && thread > 0) look_up(step, static_cast<int>(thread));
        for (std::size_t i = 0; i < pages_.size(); ++i) {
          const std::size_t p = (i + thread * 2) % pages_.size();
          const std::size_t q = (p + 1) % pages_.size();
          std::vector<Access> accesses = {{pages_[p], false}};
          if (i % 2 == 1 && q > p) accesses.push_back({pages_[q], false});
          look(step, accesses);
        }
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (first == nullptr) first = std::current_exception();
      }
    };
    std::vector<std::jthread> others;
    for (unsigned t = 1; t < r_.touching_threads; ++t) others.emplace_back(run, t);
    run(0);
    others.clear();
    if (first != nullptr) std::rethrow_exception(first);
  }

  /// Some rows of a page, where they lie if the pager lets them be read there.
  void look_up(int step, int which) {
    const std::size_t p = pages_.size() - 3;
    pager::Lookup lookup;
    lookup.page = pages_[p];
    lookup.first = 1;
    lookup.width = 7;
    std::vector<std::int64_t> rows = {-1, 1 << 30};
    const auto all = static_cast<std::int64_t>((pages_[p]->elements - lookup.first) / lookup.width);
    for (std::int64_t i = 0; i < all / 4; ++i) rows.push_back((i * i + step + which) % all);
    lookup.count = rows.size();
    lookup.rows = [&] { return rows; };
    const pager::Pin pin = runtime_.pager().look_up(lookup, nullptr);
    if (!pin) return;
    const Bits& right = right_[static_cast<std::size_t>(step)][p];
    bool equal = true;
    for (const pager::Range& range : pager::elements_of(rows, lookup)) {
      const Bytes begin = range.begin * pages_[p]->element_size;
      const Bytes bytes = range.size() * pages_[p]->element_size;
      equal = equal && std::memcmp(places_[p].data() + begin, &right[begin], bytes) == 0;
    }
    if (!equal) throw EngineError(fmt::format("rows of page {} differ in step {}", p, step));
  }

  void look(int step, const std::vector<Access>& accesses) {
    const pager::Pin pin = runtime_.pager().touch(accesses, 1, nullptr);
    std::string wrong;
    for (const Access& access : accesses) {
      const std::size_t p = access.page->id;
      const Bits& right = right_[static_cast<std::size_t>(step)][p];
      const std::byte* data = places_[p].data();
      if (data == nullptr) {
        wrong = fmt::format("page {} is not bound in step {}", p, step);
      } else if (!right.empty() && std::memcmp(data, right.data(), right.size()) != 0) {
        wrong = fmt::format("rank {}: page {} has other bytes in step {}", rank_, p, step);
      }
    }
    if (!wrong.empty()) throw EngineError(wrong);
  }

  void backward(int step, int micro) {
    const bool last = micro + 1 == r_.micro_batches;
    thaw(step, micro);
    runtime_.begin_backward(last);
    for (std::size_t i = pages_.size(); i-- > 0;) {
      look(step, {{pages_[i], false}});
      if (!contributes(r_, rank_, step, micro, i)) continue;
      auto bits = std::make_shared<Bits>(gradient(r_, rank_, step, micro, i));
      Contribution contribution;
      contribution.page = runtime_.trained(*pages_[i]);
      contribution.present = {true};
      contribution.data = bits->data();
      contribution.keep = bits;
      runtime_.contribute(std::move(contribution));
    }
    if (last && r_.in_backward) r_.in_backward(step, runtime_, pages_);
    runtime_.end_backward();
  }

  const Rehearsal& r_;
  const std::vector<std::vector<Bits>>& right_;
  const int rank_;
  std::vector<pager::PlainBinding> places_;
  std::vector<Page*> pages_;
  std::vector<bool> agreed_;  // of r_.frozen: trained
  Runtime runtime_;
};

}  // namespace

Config tiny() {
  Config config;
  config.device = "cpu";
  config.device_budget = 100_KiB + 60_KiB;
  config.gradient_staging = 80_KiB;
  config.parameters = config.gradients = config.optimizer_state = Placement::Host;
  config.staging = 16_KiB;
  config.update_chunk = 16_KiB;
  config.update_buffers = 2;
  config.bucket = 24_KiB;
  config.fetch_threads = 2;
  config.update_threads = 2;
  return config;
}

void rehearse(const Rehearsal& rehearsal) {
  rehearse(rehearsal, comm::make_thread_worlds(rehearsal.ranks), {});
}

void rehearse(const Rehearsal& rehearsal, const Worlds& worlds, const AtEnd& at_end) {
  const auto right = expected(rehearsal);
  std::vector<std::exception_ptr> errors(worlds.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < worlds.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          Rank rank(rehearsal, worlds[i], right);
          rank.train();
          if (at_end) at_end(static_cast<int>(i), rank.runtime());
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
}

}  // namespace pagoda::engine
