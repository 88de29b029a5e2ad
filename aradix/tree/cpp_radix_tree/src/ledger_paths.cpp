// What happens to a whole path: it is pinned, used, let go of, and merged where neighbours became equal.
#include <algorithm>
#include <utility>

#include "ledger.hpp"

namespace aradix {

void Ledger::lock_one(Node &node) {
    if (node.lock_ref == 0) {
        evictable_tokens -= num_tokens(node);
        protected_tokens += num_tokens(node);
    }
    ++node.lock_ref;
}

void Ledger::lock(Handle bottom, Handle locked) {
    ranking_.discard(bottom);
    for (Handle handle = bottom; handle != locked; handle = at(handle).parent)
        lock_one(at(handle));
}

size_t Ledger::touch_and_lock(Handle bottom) {
    Touching touch = touching(bottom);
    ranking_.discard(bottom);
    for (Handle handle = bottom; handle != kNone; handle = at(handle).parent) {
        lock_one(at(handle));
        touch(at(handle));
    }
    return has_priorities_ ? 0 : touch.from;
}

template <class Each> void Ledger::unlock_each(Handle bottom, nb::list &freed, Each each) {
    Handle handle = bottom;
    while (handle != kNone) {
        Node &node = at(handle);
        each(node);
        Handle above = node.parent;
        if (--node.lock_ref == 0) {
            if (node.detached) {
                drop_detached(handle, freed);
            } else {
                protected_tokens -= num_tokens(node);
                evictable_tokens += num_tokens(node);
                if (node.num_children == 0) {
                    refile(handle);
                    prune(handle);
                }
            }
        }
        handle = above;
    }
}

void Ledger::unlock(Handle bottom, nb::list &freed) {
    unlock_each(bottom, freed, [](Node &) {});
}

size_t Ledger::touch_and_unlock(Handle bottom, nb::list &freed) {
    Touching touch = touching(bottom);
    unlock_each(bottom, freed, [&touch](Node &node) { touch(node); });
    return has_priorities_ ? 0 : touch.from;
}

Ledger::Touching Ledger::touching(Handle bottom) {
    ++tick_;
    if (reuse_ && reuse_->advance(tick_))
        ranking_.set_stay(reuse_->stay());
    return Touching{tick_, at(bottom).last_access};
}

Ledger::Touched Ledger::touch(Handle bottom) {
    Touching touch = touching(bottom);
    nb::object ready;
    for (Handle handle = bottom; handle != kNone; handle = at(handle).parent) {
        Node &node = at(handle);
        touch(node);
        if (marked_ && node.ready.is_valid())
            ready = records_.newest_ready(ready, node.ready);
    }
    refile(bottom);
    return {std::move(ready), has_priorities_ ? 0 : touch.from};
}

void Ledger::refile(Handle handle) {
    const Node &node = at(handle);
    if (node.num_children != 0 || node.lock_ref != 0 || node.detached || node.parent == kNone)
        ranking_.discard(handle);
    else
        ranking_.file(handle);
}

Handle Ledger::merge_path(Handle bottom, size_t from) {
    if (!ranking_.merges())
        return bottom;
    // A merge keeps the child, so the handle of the path's end changes only where its own only child is merged into it.
    if (at(bottom).parent != kNone && at(bottom).num_children == 1) {
        Handle child = at(bottom).first_child;
        if (try_merge(bottom))
            bottom = child;
    }
    Handle node = bottom;
    for (;;) {
        Handle parent = at(node).parent;
        if (parent == kNone || at(parent).parent == kNone || at(parent).depth < from)
            return bottom;
        if (ranking_.plainly_differ(at(parent), at(node)) || at(parent).num_children != 1 || !try_merge(parent))
            node = parent;
    }
}

// Merge an only child into its parent, if lock_ref and the policy's state are equal and neither has a gate. The child's
// node is kept, with the id under which handles know the end of both, and takes the parent's place and tokens.
bool Ledger::try_merge(Handle parent_handle) {
    Handle handle = at(parent_handle).first_child;
    Node &parent = at(parent_handle), &child = at(handle);
    if (parent.lock_ref != child.lock_ref || parent.gate != kOpen || child.gate != kOpen)
        return false;
    if (!same_time(parent_handle, handle) || !ranking_.same_state(parent_handle, handle))
        return false;
    untime(parent_handle);
    nb::object ready = records_.newest_ready(parent.ready, child.ready);
    nb::object streams = joined_streams(parent.streams, child.streams);
    if (reuse_)
        reuse_->merge(parent, child);
    ranking_.discard(handle);
    child.slots.join_front(std::move(parent.slots), page_size_);
    child.tokens.join_front(std::move(parent.tokens));
    child.page_hash = parent.page_hash;
    if (records_events_)
        child.pages.join_front(std::move(parent.pages));
    child.hit_count = std::max(parent.hit_count, child.hit_count);
    child.past_uses = std::min(parent.past_uses, child.past_uses);
    child.priority = std::max(parent.priority, child.priority);
    child.last_access = std::max(parent.last_access, child.last_access);
    child.created = std::min(parent.created, child.created);
    child.ready = std::move(ready);
    child.streams = std::move(streams);
    take_place(parent_handle, handle);
    forget(parent_handle);
    --num_nodes;
    refile(handle);
    return true;
}

}  // namespace aradix
