// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "pagoda/device/stream.h"
#include "pagoda/pager/access.h"
#include "pagoda/pager/home.h"

namespace pagoda::pager {

class Pager;

/// Pages that an operator uses: they stay where they are while it lives. Made by Pager::touch() and
/// Pager::look_up(); goes before what it was made with, on the thread that made it.
class Pin {
 public:
  /// Of nothing.
  Pin() = default;
  Pin(Pin&& other) noexcept { *this = std::move(other); }
  Pin& operator=(Pin&& other) noexcept {
    release();
    pager_ = std::exchange(other.pager_, nullptr);
    accesses_ = other.accesses_;
    lookup_ = other.lookup_;
    consumer_ = other.consumer_;
    return *this;
  }
  ~Pin() { release(); }

  explicit operator bool() const noexcept { return pager_ != nullptr; }
  void release() noexcept;

 private:
  friend class Pager;
  Pin(Pager& pager, std::span<const Access> accesses, device::Stream* consumer)
      : pager_(&pager), accesses_(accesses), consumer_(consumer) {}
  Pin(Pager& pager, Page& lookup, device::Stream* consumer)
      : pager_(&pager), lookup_(&lookup), consumer_(consumer) {}
  /// What it had is somebody else's now.
  void forget() noexcept { pager_ = nullptr; }

  Pager* pager_ = nullptr;
  std::span<const Access> accesses_;
  Page* lookup_ = nullptr;
  device::Stream* consumer_ = nullptr;
};

/// A page that user code uses by raw pointers: it stays where it is and bound while this lives, on
/// whatever thread. Made by Pager::hold().
class Hold {
 public:
  Hold(Hold&& other) noexcept : pager_(std::exchange(other.pager_, nullptr)), page_(other.page_) {}
  Hold& operator=(Hold&&) = delete;
  ~Hold();

 private:
  friend class Pager;
  Hold(Pager& pager, Page& page) : pager_(&pager), page_(&page) {}

  Pager* pager_;
  Page* page_;
};

/// Somebody outside the pager who reads a page's home, for another rank: an update waits until it
/// has gone. Made by Pager::read().
class HomeReader {
 public:
  HomeReader(HomeReader&& other) noexcept
      : pager_(std::exchange(other.pager_, nullptr)), page_(other.page_), wanted_(other.wanted_) {}
  HomeReader& operator=(HomeReader&&) = delete;
  ~HomeReader();

  /// Updates that the page shall have seen: with more than the home has, somebody is about to
  /// write.
  std::uint64_t wanted() const noexcept { return wanted_; }
  const Home& home() const noexcept;
  /// The elements that it has.
  Range range() const noexcept;

 private:
  friend class Pager;
  HomeReader(Pager& pager, Page& page, std::uint64_t wanted)
      : pager_(&pager), page_(&page), wanted_(wanted) {}

  Pager* pager_;
  Page* page_;
  std::uint64_t wanted_;
};

}  // namespace pagoda::pager
