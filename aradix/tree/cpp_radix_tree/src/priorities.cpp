// Priorities of parts of a path, some of them for a time.
#include <algorithm>

#include "tree.hpp"

namespace aradix {

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

bool Ledger::same_time(Handle first, Handle second) const {
    if (!nodes_[first].timed && !nodes_[second].timed)
        return true;
    return nodes_[first].timed && nodes_[second].timed && timed_.of(first) == timed_.of(second);
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

}  // namespace aradix
