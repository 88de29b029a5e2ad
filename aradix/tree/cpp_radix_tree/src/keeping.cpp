// What is worth more, and what goes: shares of tenants, and priorities of parts of a path, some of them for a time.
#include <algorithm>

#include "tree.hpp"

namespace aradix {

// ---- priorities ----

void Ledger::set_priority(Handle handle, int64_t priority, int64_t expires) {
    Node &node = at(handle);
    int64_t before = node.timed ? timed_.of(handle).after : node.priority;
    untime(handle);
    node.priority = priority;
    if (expires != 0) {
        node.timed = true;
        timed_.put(handle, Timed{expires, before}, node.order);
    }
}

void Ledger::untime(Handle handle) {
    if (!at(handle).timed)
        return;
    at(handle).timed = false;
    timed_.discard(handle);
}

void Tree::prioritize(int64_t node_id, int64_t start, int64_t stop, nb::handle priority_object, int64_t expires) {
    Step step(*this);
    Handle bottom = node_named(node_id);
    int64_t priority = saturated(priority_object);
    if (!has_priorities_)
        return;
    size_t first = static_cast<size_t>(std::max<int64_t>(start, 0)) * item_bytes_;
    size_t last = static_cast<size_t>(std::max<int64_t>(stop, 0)) * item_bytes_;
    if (first % page_bytes_ != 0 || last % page_bytes_ != 0)
        throw nb::value_error("priorities are of whole pages");
    Handle handle = bottom;
    while (at(handle).parent != kNone && at(handle).depth > first) {
        size_t begin = at(handle).begin();
        if (begin < last && last < at(handle).depth) {
            handle = split(handle, last - begin);
            continue;
        }
        if (begin < first)
            split(handle, first - begin);
        if (at(handle).depth <= last)
            set_priority(handle, priority, expires);
        handle = at(handle).parent;
    }
    refile(bottom);
    merge_path(bottom);
}

void Tree::decay(int64_t now) {
    Step step(*this);
    for (Handle handle = timed_.first(); handle != kNone && timed_.of(handle).expires <= now; handle = timed_.first()) {
        at(handle).priority = timed_.of(handle).after;
        untime(handle);
        refile(handle);
        if (!ranking_.merges())
            continue;
        Handle child = at(handle).first_child;
        if (at(handle).num_children == 1 && try_merge(handle))
            handle = child;
        Handle parent = at(handle).parent;
        if (parent != kNone && at(parent).parent != kNone && at(parent).num_children == 1)
            try_merge(parent);
    }
}

// ---- shrinking ----

// Lets go of so many tokens, least valuable first, with `only_excess` only of those above their tenant's share. `give`
// gets a leaf that is about to lose so many tokens of its tail.
template <class Give> void Tree::shrink(int64_t count, bool only_excess, Give give) {
    auto page_size = static_cast<int64_t>(page_size_);
    if (reuse_ && count > 0)
        reuse_->note_capacity(evictable_tokens + protected_tokens);
    while (count > 0) {
        Handle handle = ranking_.least();
        if (handle == kNone)
            break;
        fetch_ahead(handle);
        Node &leaf = at(handle);
        int64_t size = num_tokens(leaf);
        int64_t least = count;
        if (shares_) {
            Share &share = shares_.at(leaf.share);
            if (share.excess() > 0)
                least = std::min(count, share.excess());
            else if (only_excess)
                break;
        }
        int64_t wanted = (least - 1) / page_size < size / page_size ? ((least - 1) / page_size + 1) * page_size : size;
        if (shares_)
            shares_.at(leaf.share).evicted += whole_nodes_ ? size : std::min(size, wanted);
        if (whole_nodes_ || size <= wanted) {
            count -= size;
            give(leaf, size);
            record_removed(std::move(leaf.pages));
            remove_leaf(handle, true);
        } else {
            count -= wanted;
            give(leaf, wanted);
            trim(handle, wanted);
        }
    }
}

nb::object Tree::evict(nb::handle num_tokens_object, nb::handle name_space, nb::handle demand_object,
                       bool only_excess) {
    Step step(*this);
    int64_t count = saturated(num_tokens_object), demand = saturated(demand_object);
    if (!shares_ || name_space.is_none())
        return evict_tokens(count, only_excess);
    struct Demand {
        Demand(Shares &shares, uint32_t share, int64_t count) : shares(shares), share(share) {
            shares.set_demand(share, count);
        }
        ~Demand() { shares.set_demand(share, 0); }
        Shares &shares;
        uint32_t share;
    } demanding(shares_, shares_.of(name_space), demand);
    return evict_tokens(count, only_excess);
}

nb::list Tree::evict_tokens(int64_t count, bool only_excess) {
    nb::list freed;
    shrink(count, only_excess, [&](const Node &leaf, int64_t count) {
        append_to(freed, freed_record(slots_copy(leaf, num_tokens(leaf) - count), leaf.streams));
    });
    return freed;
}

int64_t Tree::evict_pages(int64_t count, int32_t *out, int64_t room) {
    int64_t num_pages = 0;
    bool are_pages = true;
    std::vector<int32_t> narrowed;
    shrink(count, false, [&](const Node &leaf, int64_t size) {
        size_t first = static_cast<size_t>(num_tokens(leaf) - size), wanted = static_cast<size_t>(size) / page_size_;
        const int32_t *from = leaf.slots.pages() + first / page_size_;
        if (leaf.slots.is_wide()) {
            narrowed.resize(wanted);
            are_pages &= leaf.slots.read_pages(narrowed.data(), first, static_cast<size_t>(size), page_size_);
            from = narrowed.data();
        }
        int64_t fitting = std::clamp<int64_t>(room - num_pages, 0, static_cast<int64_t>(wanted));
        if (fitting != 0)
            std::memcpy(out + num_pages, from, static_cast<size_t>(fitting) * sizeof(int32_t));
        spare_pages_.insert(spare_pages_.end(), from + fitting, from + wanted);
        num_pages += static_cast<int64_t>(wanted);
    });
    if (!are_pages)
        throw std::runtime_error("the tree let go of slots that are no pages of its pool");
    return num_pages;
}

// ---- shares ----

uint32_t Tree::share_of(nb::handle name_space) {
    Step step(*this);
    return shares_.of(name_space);
}

void Tree::charge(uint32_t share, int64_t num_tokens) {
    Step step(*this);
    if (shares_)
        shares_.add_leased(share, num_tokens);
}

nb::object Tree::shares() {
    Step step(*this);
    return shares_.views();
}

}  // namespace aradix
