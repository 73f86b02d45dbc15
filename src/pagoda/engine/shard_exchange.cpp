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
      piece_(options_.staging),
      completers_(kCompleted, "complete") {
  pager::Tiers& tiers = pager_.tiers();
  if (needs_buffers(tiers.device()->kind(), tiers.swap() != nullptr)) {
    to_serve_.emplace(tiers.host(), kServed, options_.staging, "shards for other ranks");
    if (options_.whole_pages) {
      to_complete_.emplace(tiers.host(), kCompleted, options_.staging, "parts of other ranks");
    }
  }
  pulls_ = std::make_unique<comm::PullService>(
      std::move(group),
      [this](const comm::PullRequest& request, comm::PullReply& reply) { serve(request, reply); },
      comm::PullService::Options{.on_failure = options_.on_end});
}

ShardExchange::~ShardExchange() {
  completers_.stop(ThreadPool::Stop::Cancel);  // they use the service
  pulls_.reset();
}

void ShardExchange::pull(pager::PageId page, std::uint64_t version, std::span<const Piece> pieces) {
  const std::uint64_t key = key_of(page);
  std::vector<comm::Pull> pulls;
  pulls.reserve(pieces.size());
  for (const Piece& piece : pieces) add_pulls(piece, key, version, pulls);
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

bool ShardExchange::is_shared(const Page& page) {
  const std::lock_guard lock(mutex_);
  return shared_.contains(page.id);
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

/// In parts no larger than what the other rank has buffers for.
void ShardExchange::add_pulls(const Piece& piece, std::uint64_t key, std::uint64_t version,
                              std::vector<comm::Pull>& pulls) const {
  for (Bytes done = 0; done < piece.to.size();) {
    const Bytes part = std::min<Bytes>(piece_.load(), piece.to.size() - done);
    pulls.push_back({piece.rank, key, version, piece.begin + done, piece.to.subspan(done, part)});
    done += part;
  }
}

bool ShardExchange::shard_updated(TrainedPage& page, std::uint64_t version) {
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
  PAGODA_TRACE("engine", "complete", {"page", page.name()});
  pager::Tiers& tiers = pager_.tiers();
  const Bytes size = page.element_size;
  const std::uint64_t key = key_of(page.id);
  pager::Home& home = trained.home();  // from mark_pending() to updated()
  const bool direct = tiers.in_place(home);
  std::vector<comm::Pull> pulls;
  pager::StagingPool::Buffer buffer;
  if (!direct) buffer = to_complete_->take();
  if (direct) tiers.wait_for_users(home);
  for (int rank = 0; rank < ranks_; ++rank) {
    const Range range = pager_.sharding().of(page.elements, rank);
    if (rank == options_.rank || range.empty()) continue;
    if (direct) {
      const Piece piece{
          rank, range.begin * size, {home.data() + range.begin * size, range.size() * size}};
      add_pulls(piece, key, version, pulls);
      continue;
    }
    for (Bytes at = range.begin * size; at < range.end * size;) {
      const auto part = buffer.bytes().first(std::min<Bytes>(piece_.load(), range.end * size - at));
      pulls_->pull(rank, key, version, at, part);
      tiers.write(home, at, part);
      at += part.size();
    }
  }
  if (!pulls.empty()) pulls_->pull(pulls);
  pager_.updated(page, version);
}

void ShardExchange::wait_for_completion() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return completing_ == 0 || failed_; });
}

/// Bytes of a home that are being sent to another rank.
struct ShardExchange::Serving {
  Serving(ShardExchange& exchange, std::shared_ptr<Page> of, const comm::PullRequest& request)
      : to(exchange),
        page(std::move(of)),
        version(request.version),
        bytes(request.bytes),
        reader(exchange.pager_.read(*page)) {}
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;
  ~Serving() {
    { const pager::HomeReader ended = std::move(reader); }
    to.served(*page, version, bytes);
  }

  ShardExchange& to;
  std::shared_ptr<Page> page;
  std::uint64_t version;
  Bytes bytes;
  pager::HomeReader reader;
};

/// Another rank asks for bytes of this rank's shard.
void ShardExchange::serve(const comm::PullRequest& request, comm::PullReply& reply) {
  const std::shared_ptr<Page> found = find(request.key);
  if (found == nullptr) {
    reply.refuse("the page has been released");
    return;
  }
  Page& page = *found;
  reply.about_to_wait();
  updater_.wait_for_shard(page, request.version);
  const auto reading = std::make_shared<const Serving>(*this, found, request);
  const pager::HomeReader& reader = reading->reader;
  if (reader.wanted() != request.version) {  // its update may be under way
    reply.refuse_version(fmt::format("page '{}' has gone on from version {} to {}", page.name(),
                                     request.version, reader.wanted()));
    return;
  }
  const pager::Home& home = reader.home();
  const Bytes at = request.begin - reader.range().begin * page.element_size;
  const bool on_device = home.tier() == Tier::Device && !to_serve_;  // the host's own memory
  if (home.tier() == Tier::Host || on_device) {
    reply.give({home.data() + at, request.bytes}, reading);
    return;
  }
  PAGODA_CHECK(to_serve_.has_value());
  PAGODA_CHECK(request.bytes <= to_serve_->each(), "{} asked for at a time, with staging of {}",
               format_bytes(request.bytes), format_bytes(options_.staging));
  const auto buffer = std::make_shared<pager::StagingPool::Buffer>(to_serve_->take());
  const std::span bytes = buffer->bytes().first(request.bytes);
  pager_.tiers().read(home, at, bytes);
  reply.give(bytes, buffer);
}

void ShardExchange::served(const Page& page, std::uint64_t version, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  Served& so_far = to_others_[page.id];
  if (so_far.version < version) so_far = {version, 0};
  if (so_far.version == version) so_far.bytes += bytes;
  changed_.notify_all();
}

/// Where every rank keeps whole pages, the others read this rank's shard of each version once: user
/// code may change it after that.
void ShardExchange::wait_for_other_ranks(const Page& page) {
  if (!options_.whole_pages) return;
  const std::uint64_t version = pager_.look(page).version;
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
