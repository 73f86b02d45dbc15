// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/shard_exchange.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {

using optim::TrainedPage;
using pager::Page;
using pager::Range;
using pager::Tier;

ShardExchange::ShardExchange(std::unique_ptr<comm::Group> group, pager::Pager& pager,
                             optim::Updater& updater, Options options)
    : pager_(pager),
      updater_(updater),
      options_(std::move(options)),
      ranks_(group->size()),
      pulls_(std::make_unique<comm::PullService>(
          std::move(group),
          [this](const comm::PullRequest& request, comm::PullReply& reply) {
            serve(request, reply);
          },
          comm::PullService::Options{.on_failure = options_.on_end})),
      completers_(2, "complete") {}

ShardExchange::~ShardExchange() {
  completers_.stop(ThreadPool::Stop::Cancel);  // they use the service
  pulls_.reset();
}

void ShardExchange::pull(pager::PageId page, std::uint64_t version, std::span<const Piece> pieces) {
  const std::uint64_t key = key_of(page);
  std::vector<comm::Pull> pulls;
  pulls.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    pulls.push_back({piece.rank, key, version, piece.begin, piece.to});
  }
  pulls_->pull(pulls);
}

void ShardExchange::share(std::span<Page* const> pages) {
  const std::lock_guard lock(mutex_);
  for (Page* page : pages) {
    // A key of before stays good: another rank's prefetch may be on its way with it.
    const std::uint64_t key = next_key_++;
    shared_[page->id].page = page;
    shared_[page->id].keys.push_back(key);
    of_key_[key] = page->id;
  }
}

void ShardExchange::unshare(const Page& page) {
  std::unique_lock lock(mutex_);
  const auto found = shared_.find(page.id);
  if (found == shared_.end()) return;
  for (const std::uint64_t key : found->second.keys) of_key_.erase(key);
  changed_.wait(lock, [&] { return shared_.at(page.id).answering == 0; });
  shared_.erase(page.id);
  to_others_.erase(page.id);
}

std::uint64_t ShardExchange::key_of(pager::PageId page) {
  const std::lock_guard lock(mutex_);
  const auto found = shared_.find(page);
  PAGODA_CHECK(found != shared_.end(), "page {} is not shared with other ranks", page);
  return found->second.keys.back();
}

/// The page, which stays while the pointer lives; null where there is none.
std::shared_ptr<Page> ShardExchange::find(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  const auto found = of_key_.find(key);
  if (found == of_key_.end()) return nullptr;
  Shared& shared = shared_.at(found->second);
  ++shared.answering;
  return {shared.page, [this](const Page* page) {
            const std::lock_guard done(mutex_);
            if (--shared_.at(page->id).answering == 0) changed_.notify_all();
          }};
}

bool ShardExchange::part_updated(TrainedPage& page, std::uint64_t version) {
  if (!options_.whole_pages) return true;
  {
    const std::lock_guard lock(mutex_);
    ++completing_;
  }
  (void)completers_.submit([this, &page, version] {
    try {
      complete(page, version);
    } catch (...) {
      options_.on_failure(std::current_exception());
    }
    const std::lock_guard lock(mutex_);
    --completing_;
    changed_.notify_all();
  });
  return false;
}

void ShardExchange::complete(TrainedPage& trained, std::uint64_t version) {
  Page& page = *trained.page;
  PAGODA_TRACE("engine", "complete", {"page", page.name});
  pager::Tiers& tiers = pager_.tiers();
  const Bytes size = page.element_size;
  const std::uint64_t key = key_of(page.id);
  const bool direct = tiers.in_place(page.home);
  std::vector<comm::Pull> pulls;
  std::vector<std::byte> buffer;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Range range = pager_.sharding().of(page.elements, rank);
    if (rank == options_.rank || range.empty()) continue;
    if (direct) {
      pulls.push_back({rank,
                       key,
                       version,
                       range.begin * size,
                       {page.home.data() + range.begin * size, range.size() * size}});
      continue;
    }
    const std::uint64_t most = std::max<Bytes>(size, options_.staging / size * size);
    for (Bytes at = range.begin * size; at < range.end * size;) {
      buffer.resize(std::min<Bytes>(most, range.end * size - at));
      pulls_->pull(rank, key, version, at, buffer);
      tiers.write(page.home, at, buffer);
      at += buffer.size();
    }
  }
  if (!pulls.empty()) pulls_->pull(pulls);
  pager_.updated(page, version);
}

void ShardExchange::settle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return completing_ == 0 || failed_; });
}

/// Another rank asks for bytes of this rank's shard.
void ShardExchange::serve(const comm::PullRequest& request, comm::PullReply& reply) {
  const std::shared_ptr<Page> found = find(request.key);
  if (found == nullptr) {
    reply.refuse("the page has been released");
    return;
  }
  Page& page = *found;
  reply.about_to_wait();
  updater_.settle_part(page, request.version);
  const std::uint64_t wanted = pager_.add_reader(page);
  const auto reading = std::shared_ptr<void>(
      nullptr, [this, found, version = request.version, bytes = request.bytes](void*) {
        pager_.remove_reader(*found);
        served(*found, version, bytes);
      });
  if (wanted != request.version) {  // its update may be under way
    reply.refuse(fmt::format("page '{}' has gone on from version {} to {}", page.name,
                             request.version, wanted));
    return;
  }
  const Bytes at = request.begin - page.home_range.begin * page.element_size;
  if (page.home.tier() == Tier::Host) {
    reply.give({page.home.data() + at, request.bytes}, reading);
    return;
  }
  auto bytes = std::make_shared<std::vector<std::byte>>(request.bytes);
  pager_.tiers().read(page.home, at, *bytes);
  reply.give(*bytes, bytes);
}

void ShardExchange::served(const Page& page, std::uint64_t version, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  Served& so_far = to_others_[page.id];
  if (so_far.version < version) so_far = {version, 0};
  if (so_far.version == version) so_far.bytes += bytes;
  changed_.notify_all();
}

/// Where every rank keeps whole pages, the others read this rank's part of each version once: user
/// code may change it after that.
void ShardExchange::await_served(const Page& page) {
  if (!options_.whole_pages) return;
  std::uint64_t version = 0;
  {
    const auto lock = pager_.lock();
    version = page.version;
  }
  if (version == 0) return;
  const Bytes all =
      pager_.shard_of(page).size() * page.element_size * static_cast<Bytes>(ranks_ - 1);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    if (failed_) return true;
    const auto found = to_others_.find(page.id);
    const bool now = found != to_others_.end() && found->second.version >= version;
    return all == 0 || (now && found->second.bytes >= all);
  });
}

void ShardExchange::fail(const std::string& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }
  pulls_->abort(why);
}

}  // namespace pagoda::engine
