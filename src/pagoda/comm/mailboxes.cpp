// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/mailboxes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pagoda/comm/comm_error.h"

namespace pagoda::comm {
namespace {

constexpr int kAnyone = -1;

std::size_t index_of(int rank) {
  return static_cast<std::size_t>(rank);
}

}  // namespace

Mailboxes::Mailboxes(int ranks, Links links)
    : links_(std::move(links)),
      sends_(index_of(ranks)),
      receives_(index_of(ranks)),
      aborted_(index_of(ranks), false),
      gone_(index_of(ranks), false) {}

bool Mailboxes::exchange(int me, std::span<const Transfer> transfers) {
  std::vector<Post> posts(transfers.size());
  for (std::size_t i = 0; i < posts.size(); ++i) posts[i].transfer = transfers[i];
  return run(me, posts);
}

int Mailboxes::receive_any(int me, Tag tag, std::span<std::byte> data) {
  Post post;
  post.transfer = receive_from(kAnyone, tag, data);
  return run(me, {&post, 1}) ? post.source : -1;
}

bool Mailboxes::run(int me, std::span<Post> posts) {
  Waiter waiter;
  std::vector<Post*> matched;
  Lock lock(mutex_);
  if (aborted_[index_of(me)]) return false;
  waiter.open = posts.size();
  for (Post& post : posts) {
    post.owner = me;
    post.waiter = &waiter;
    place(lock, post);
    if (post.state == State::Moving) matched.push_back(&post);
  }
  move(lock, matched);
  waiter.wake.wait(lock, [&] { return waiter.open == 0 || waiter.failed; });
  withdraw(lock, waiter);
  waiter.wake.wait(lock, [&] { return waiter.open == 0; });  // those that are being copied
  lock.unlock();

  if (waiter.failed) fail(posts);
  Nanos ready_at = 0;
  for (const Post& post : posts) {
    if (post.state != State::Done) return false;
    ready_at = std::max(ready_at, post.ready_at);
  }
  if (ready_at != 0) sleep_until_ns(ready_at);
  return true;
}

void Mailboxes::place(const Lock& lock, Post& post) {
  const bool sends = post.transfer.sends();
  const int peer = post.transfer.peer;
  if (peer != kAnyone && gone_[index_of(peer)]) return finish(lock, post, State::Lost);
  const std::size_t box = index_of(sends ? peer : post.owner);
  Queues& others = (sends ? receives_ : sends_)[box];
  if (const auto found = others.find(post.transfer.tag); found != others.end()) {
    for (auto at = found->second.begin(); at != found->second.end(); ++at) {
      Post& other = **at;
      const int wanted = other.transfer.peer;
      if (peer != kAnyone && other.owner != peer) continue;
      if (wanted != kAnyone && wanted != post.owner) continue;
      found->second.erase(at);
      if (found->second.empty()) others.erase(found);
      Post& out = sends ? post : other;
      Post& in = sends ? other : post;
      if (out.transfer.out.size() > in.transfer.in.size()) {
        finish(lock, out, State::Misfit);
        finish(lock, in, State::Misfit);
        return;
      }
      post.partner = &other;
      other.partner = &post;
      post.source = other.source = out.owner;
      post.state = other.state = State::Moving;
      return;
    }
  }
  (sends ? sends_ : receives_)[box][post.transfer.tag].push_back(&post);
}

void Mailboxes::move(Lock& lock, std::span<Post* const> matched) {
  if (matched.empty()) return;
  lock.unlock();
  for (Post* post : matched) {
    Post& out = post->transfer.sends() ? *post : *post->partner;
    Post& in = *out.partner;
    std::memcpy(in.transfer.in.data(), out.transfer.out.data(), out.transfer.out.size());
    if (links_.empty()) continue;
    const auto slot = links_[index_of(out.owner)]->take(out.transfer.out.size(), now_ns());
    out.ready_at = in.ready_at = slot.end;
  }
  lock.lock();
  for (Post* post : matched) {
    finish(lock, *post->partner, State::Done);
    finish(lock, *post, State::Done);
  }
}

void Mailboxes::finish(const Lock&, Post& post, State state) {
  post.state = state;
  post.waiter->failed |= state == State::Lost || state == State::Misfit;
  --post.waiter->open;
  post.waiter->wake.notify_all();  // under the lock: the waiter may end as soon as it is free
}

template <class Which>
void Mailboxes::sweep(const Lock& lock, Queues& queues, State state, Which which) {
  for (auto queue = queues.begin(); queue != queues.end();) {
    std::erase_if(queue->second, [&](Post* post) {
      if (!which(*post)) return false;
      finish(lock, *post, state);
      return true;
    });
    queue = queue->second.empty() ? queues.erase(queue) : std::next(queue);
  }
}

void Mailboxes::withdraw(const Lock& lock, const Waiter& waiter) {
  if (waiter.open == 0) return;
  for (std::vector<Queues>* boxes : {&sends_, &receives_}) {
    for (Queues& queues : *boxes) {
      sweep(lock, queues, State::Withdrawn,
            [&](const Post& post) { return post.waiter == &waiter; });
    }
  }
}

void Mailboxes::abort(int me) noexcept {
  const Lock lock(mutex_);
  aborted_[index_of(me)] = true;
  for (std::vector<Queues>* boxes : {&sends_, &receives_}) {
    for (Queues& queues : *boxes) {
      sweep(lock, queues, State::Withdrawn, [&](const Post& post) { return post.owner == me; });
    }
  }
}

void Mailboxes::leave(int me) noexcept {
  const Lock lock(mutex_);
  gone_[index_of(me)] = true;
  for (std::vector<Queues>* boxes : {&sends_, &receives_}) {
    for (Queues& queues : *boxes) {
      sweep(lock, queues, State::Lost, [&](const Post& post) { return post.transfer.peer == me; });
    }
  }
}

void Mailboxes::fail(std::span<const Post> posts) {
  for (const Post& post : posts) {
    const Transfer& transfer = post.transfer;
    if (post.state == State::Lost) {
      throw PeerLost(transfer.peer, fmt::format("rank {} has left the group", transfer.peer));
    }
    if (post.state == State::Misfit) {
      throw EngineError(transfer.sends() ? "a message is longer than its receiver expects"
                                         : "a message is longer than the span that awaits it",
                        {context("peer", transfer.peer), context("tag", transfer.tag),
                         context("bytes", transfer.bytes())});
    }
  }
  throw EngineError("a transfer failed for no known reason");
}

}  // namespace pagoda::comm
