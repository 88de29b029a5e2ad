// The index of evictable leaves under the policies that are known here.
#pragma once

#include "handles.hpp"

namespace aradix {

struct Rank {
    int64_t major = 0;
    int64_t minor = 0;
    bool operator==(const Rank &) const = default;
};

// Where each leaf is in its heap.
using Places = std::vector<uint32_t>;

// A heap of four children a place that knows where each leaf is, so that any leaf can be ranked anew or taken out in
// O(log n). Ties go to the older node. Heaps that never hold the same leaf may share their places, and `contains` then
// tells whether any of them has it.
class LeafHeap {
public:
    explicit LeafHeap(Places &places) : places_(places) {}

    bool empty() const { return entries_.empty(); }
    bool contains(Handle leaf) const { return leaf < places_.size() && places_[leaf] != kNone; }

    Handle least() const { return entries_.empty() ? kNone : entries_.front().leaf; }
    // Whether its least goes before a leaf of this rank that is not in it.
    bool goes_before(Rank rank, uint64_t order) const {
        return !entries_.empty() && entries_.front() < Entry{rank, order, kNone};
    }

    void put(Handle leaf, Rank rank, uint64_t order) {
        Entry entry{rank, order, leaf};
        if (contains(leaf)) {
            sift(places_[leaf], entry);
            return;
        }
        if (leaf >= places_.size())
            places_.resize(2 * static_cast<size_t>(leaf) + 1, kNone);
        entries_.push_back(entry);
        sift(static_cast<uint32_t>(entries_.size() - 1), entry);
    }

    void discard(Handle leaf) {
        if (!contains(leaf))
            return;
        uint32_t hole = places_[leaf];
        places_[leaf] = kNone;
        Entry last = entries_.back();
        entries_.pop_back();
        if (last.leaf != leaf)
            sift(hole, last);
    }

private:
    struct Entry {
        Rank rank;
        uint64_t order;
        Handle leaf;

        bool operator<(const Entry &other) const {
            if (rank.major != other.rank.major)
                return rank.major < other.rank.major;
            if (rank.minor != other.rank.minor)
                return rank.minor < other.rank.minor;
            return order < other.order;
        }
    };

    void set(uint32_t place, const Entry &entry) {
        entries_[place] = entry;
        places_[entry.leaf] = place;
    }

    // Puts an entry into a place whose own is moved or gone, and lets it rise or sink from there.
    void sift(uint32_t place, Entry entry) {
        while (place != 0 && entry < entries_[(place - 1) / 4]) {
            set(place, entries_[(place - 1) / 4]);
            place = (place - 1) / 4;
        }
        auto size = static_cast<uint32_t>(entries_.size());
        for (uint64_t first = 4 * static_cast<uint64_t>(place) + 1; first < size; first = 4 * first + 1) {
            auto least = static_cast<uint32_t>(first);
            for (auto child = least + 1; child < size && child < first + 4; ++child)
                if (entries_[child] < entries_[least])
                    least = child;
            if (!(entries_[least] < entry))
                break;
            set(place, entries_[least]);
            place = least;
            first = least;
        }
        set(place, entry);
    }

    std::vector<Entry> entries_;
    Places &places_;
};

}  // namespace aradix
