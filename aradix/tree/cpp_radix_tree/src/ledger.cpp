#include "ledger.hpp"

#include <bit>
#include <random>

namespace aradix {
namespace {

uint64_t secret() {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

Ledger::Ledger(const Settings &settings, Policy policy, int64_t protected_from, UserPolicy user, nb::handle shares)
    : page_size_(settings.page_size), item_bytes_(settings.item_bytes),
      page_bytes_(settings.page_size * settings.item_bytes),
      item_shift_(std::countr_zero(settings.item_bytes)), whole_nodes_(settings.whole_nodes),
      records_events_(settings.record_events), has_priorities_(settings.has_priorities), shares_(records_, shares),
      ranking_(records_, nodes_, shares_, policy, protected_from, std::move(user), settings.item_bytes,
               settings.merge && !settings.whole_nodes),
      reuse_(policy == Policy::tenure ? std::make_unique<ReuseRecord>(settings.page_size, settings.item_bytes)
                                      : nullptr),
      seed_(secret()) {}

Ledger::Step::Step(Ledger &ledger) : ledger_(ledger) {
    if (ledger.busy_)
        throw std::runtime_error(
            "the tree is in the middle of a step: a policy, a finaliser or another thread called it");
    ledger.busy_ = true;
}

// ---- finding ----

Handle Ledger::find_node(int64_t id) const {
    return ids_.find(id_hash(id), [&](Handle handle) { return nodes_[handle].id == id; });
}

Handle Ledger::node_named(int64_t id) const {
    Handle handle = find_node(id);
    if (handle == kNone) {
        PyErr_SetObject(PyExc_KeyError, integer(id).ptr());
        throw nb::python_error();
    }
    return handle;
}

Handle Ledger::find_root(const nb::object &name_space) {
    if (name_space.is(last_name_space_))
        return last_root_;
    PyObject *known = PyDict_GetItemWithError(roots_.ptr(), name_space.ptr());
    if (known == nullptr) {
        if (PyErr_Occurred())
            throw nb::python_error();
        return kNone;
    }
    last_root_ = nb::cast<Handle>(nb::handle(known));
    last_name_space_ = name_space;
    return last_root_;
}

Handle Ledger::find_child(Handle parent, const uint8_t *page) const {
    if (nodes_[parent].num_children == 0)
        return kNone;
    if (nodes_[parent].num_children == 1) {
        Handle only = nodes_[parent].first_child;
        return std::memcmp(nodes_[only].tokens.data(), page, page_bytes_) == 0 ? only : kNone;
    }
    return children_.find(child_hash(parent, page_hash(page)), [&](Handle handle) {
        const Node &node = nodes_[handle];
        return node.parent == parent && std::memcmp(node.tokens.data(), page, page_bytes_) == 0;
    });
}

void Ledger::preorder(Handle top, std::vector<Handle> &found) const {
    Handle handle = top;
    while (handle != kNone) {
        found.push_back(handle);
        if (nodes_[handle].first_child != kNone) {
            handle = nodes_[handle].first_child;
            continue;
        }
        while (handle != top && nodes_[handle].next == kNone)
            handle = nodes_[handle].parent;
        handle = handle == top ? kNone : nodes_[handle].next;
    }
}

std::vector<Handle> Ledger::root_list(bool detached) const {
    std::vector<Handle> found;
    for (Handle root = (detached ? detached_roots_ : live_roots_).first; root != kNone; root = nodes_[root].next)
        found.push_back(root);
    return found;
}

// ---- making and unmaking nodes ----

Handle Ledger::new_root(const nb::object &name_space) {
    auto root = std::make_unique<Root>();
    root->name_space = name_space;
    if (records_events_ || reuse_) {
        nb::bytes digest = nb::cast<nb::bytes>(name_space.attr("digest")());
        const auto *data = reinterpret_cast<const uint8_t *>(digest.c_str());
        root->digest.assign(data, data + digest.size());
    }
    uint32_t share = shares_.of(name_space);
    Handle handle = nodes_.make();
    Node &node = at(handle);
    node.id = ++last_id_;
    node.order = static_cast<uint64_t>(node.id);
    node.share = share;
    if (reuse_ && root->digest.size() >= sizeof node.fingerprint)  // the default namespace has no digest
        std::memcpy(&node.fingerprint, root->digest.data(), sizeof node.fingerprint);
    node.root = std::move(root);
    ids_.insert(id_hash(node.id), handle);
    roots_[name_space] = handle;
    append_sibling(live_roots_, handle);
    return handle;
}

Handle Ledger::new_leaf(Handle parent, const uint8_t *tokens, size_t size, SlotRun slots) {
    Handle handle = nodes_.make();
    Node &leaf = at(handle);
    leaf.id = ++last_id_;
    leaf.order = static_cast<uint64_t>(leaf.id);
    leaf.tokens = Bytes(tokens, size);
    leaf.slots = std::move(slots);
    leaf.depth = at(parent).depth + size;
    leaf.created = tick_ + 1;
    leaf.share = at(parent).share;
    leaf.page_hash = page_hash(tokens);
    link(parent, handle);
    ids_.insert(id_hash(leaf.id), handle);
    ++num_nodes;
    ++version;
    evictable_tokens += num_tokens(leaf);
    ranking_.discard(parent);
    shares_.add_cached(leaf.share, num_tokens(leaf));
    if (records_events_)
        record_stored(handle);
    return handle;
}

Handle Ledger::split(Handle tail_handle, size_t size, std::optional<uint64_t> fingerprint) {
    Handle handle = nodes_.make();
    Node &head = at(handle), &tail = at(tail_handle);
    head.id = ++last_id_;
    head.order = static_cast<uint64_t>(head.id);
    head.tokens = tail.tokens.split_front(size);
    head.slots = tail.slots.split_front(count_of(size), page_size_);
    head.depth = tail.begin();
    head.page_hash = tail.page_hash;
    head.lock_ref = tail.lock_ref;
    head.detached = tail.detached;
    head.last_access = tail.last_access;
    head.created = tail.created;
    head.hit_count = tail.hit_count;
    head.past_uses = tail.past_uses;
    head.of_uses = tail.of_uses;
    head.last_use = tail.last_use;
    head.priority = tail.priority;
    head.share = tail.share;
    head.ready = tail.ready;
    head.streams = tail.streams;
    if (records_events_)
        head.pages = tail.pages.split_front(size / page_bytes_);
    take_place(tail_handle, handle);
    tail.page_hash = page_hash(tail.tokens.data());
    link(handle, tail_handle);
    ids_.insert(id_hash(head.id), handle);
    num_nodes += !head.detached;
    if (fingerprint)
        head.fingerprint = *fingerprint;
    else if (reuse_)
        reuse_->split(head, tail, at(head.parent).fingerprint);
    if (tail.timed) {
        head.timed = true;
        timed_.put(handle, Timed(timed_.of(tail_handle)), head.order);
    }
    refile(tail_handle);  // it is smaller now, which a policy may look at
    return handle;
}

void Ledger::link(Handle parent, Handle child) {
    Node &node = at(child);
    node.parent = parent;
    Siblings siblings = children_of(parent);
    append_sibling(siblings, child);
    set_children(parent, siblings);
    Node &above = at(parent);
    if (++above.num_children == 2)
        file_child(above.first_child);
    if (above.num_children >= 2)
        file_child(child);
}

void Ledger::unlink(Handle child) {
    Handle parent = at(child).parent;
    if (at(parent).num_children >= 2)
        unfile_child(child);
    Siblings siblings = children_of(parent);
    remove_sibling(siblings, child);
    set_children(parent, siblings);
    if (--at(parent).num_children == 1)
        unfile_child(siblings.first);
    at(child).parent = kNone;
}

void Ledger::file_child(Handle child) {
    children_.insert(child_hash(at(child).parent, at(child).page_hash), child);
}

void Ledger::unfile_child(Handle child) {
    children_.erase(child_hash(at(child).parent, at(child).page_hash), child);
}

void Ledger::take_place(Handle old, Handle heir) {
    Node &from = at(old), &to = at(heir);
    if (at(from.parent).num_children >= 2)
        children_.replace(child_hash(from.parent, from.page_hash), old, heir);
    to.parent = from.parent;
    to.previous = from.previous;
    to.next = from.next;
    Siblings siblings = children_of(from.parent);
    (from.previous == kNone ? siblings.first : at(from.previous).next) = heir;
    (from.next == kNone ? siblings.last : at(from.next).previous) = heir;
    set_children(from.parent, siblings);
    from.parent = from.previous = from.next = kNone;
}

void Ledger::append_sibling(Siblings &siblings, Handle handle) {
    Node &node = at(handle);
    node.previous = siblings.last;
    node.next = kNone;
    (siblings.last == kNone ? siblings.first : at(siblings.last).next) = handle;
    siblings.last = handle;
}

void Ledger::remove_sibling(Siblings &siblings, Handle handle) {
    Node &node = at(handle);
    (node.previous == kNone ? siblings.first : at(node.previous).next) = node.next;
    (node.next == kNone ? siblings.last : at(node.next).previous) = node.previous;
    node.previous = node.next = kNone;
}

void Ledger::set_children(Handle parent, const Siblings &siblings) {
    at(parent).first_child = siblings.first;
    at(parent).last_child = siblings.last;
}

void Ledger::forget(Handle handle) {
    ids_.erase(id_hash(at(handle).id), handle);
    nodes_.free(handle);
}

void Ledger::fetch_below(const Node &node) const {
    if (node.num_children != 1)
        return;
    const Node &child = nodes_[node.first_child];
    child.tokens.fetch();
    if (child.num_children != 1)
        return;
    const Node &next = nodes_[child.first_child];
    __builtin_prefetch(&next, 1);
    __builtin_prefetch(&next.hit_count, 1);
}

void Ledger::fetch_ahead(Handle victim) const {
    Handle next = nodes_[victim].later;
    if (next == kNone)
        return;
    const Node &node = nodes_[next];  // fetched when it was the one after the next
    ids_.fetch(id_hash(node.id));
    if (node.previous != kNone || node.next != kNone)
        children_.fetch(child_hash(node.parent, node.page_hash));
    node.tokens.fetch();
    if (reuse_)
        node.tokens.fetch_end();  // added up where only that goes
    node.slots.fetch();
    node.pages.fetch();
    for (Handle sibling : {node.previous, node.next})
        if (sibling != kNone)
            __builtin_prefetch(&nodes_[sibling].first_child, 1);
    if (node.later != kNone) {
        const Node &after = nodes_[node.later];
        for (size_t at = 0; at < sizeof(Node); at += 64)
            __builtin_prefetch(reinterpret_cast<const char *>(&after) + at, 1);
    }
}

void Ledger::remove_leaf(Handle leaf, bool merge) {
    if (reuse_)
        reuse_->leave(at(leaf), num_tokens(at(leaf)), at(at(leaf).parent).fingerprint);
    ranking_.discard(leaf);
    evictable_tokens -= num_tokens(at(leaf));
    shares_.add_cached(at(leaf).share, -num_tokens(at(leaf)));
    untime(leaf);
    --num_nodes;
    Handle parent = at(leaf).parent;
    unlink(leaf);
    forget(leaf);
    if (at(parent).parent == kNone)
        prune(parent);
    else if (at(parent).num_children == 0)
        refile(parent);
    else if (at(parent).num_children == 1 && merge && ranking_.merges())
        try_merge(parent);
}

void Ledger::trim(Handle handle, int64_t count) {
    Node &leaf = at(handle);
    int64_t keep = num_tokens(leaf) - count;
    if (records_events_)
        record_removed(leaf.pages.split_back(static_cast<size_t>(keep) / page_size_));
    if (reuse_)
        reuse_->leave(leaf, count, at(leaf.parent).fingerprint);
    ranking_.discard(handle);
    ids_.erase(id_hash(leaf.id), handle);
    size_t size = static_cast<size_t>(count) * item_bytes_;
    leaf.slots.drop_back(static_cast<size_t>(count), page_size_);
    leaf.tokens.drop_back(size);
    leaf.depth -= size;
    leaf.id = ++last_id_;
    ids_.insert(id_hash(leaf.id), handle);
    evictable_tokens -= count;
    shares_.add_cached(leaf.share, -count);
    refile(handle);
}

void Ledger::prune(Handle handle) {
    const Node &root = at(handle);
    if (root.parent == kNone && root.num_children == 0 && root.lock_ref == 0 && !root.detached) {
        remove_root(handle, false);
        forget(handle);
    }
}

// Make a root unfindable; with `keep` it goes to those that were flushed and are held.
void Ledger::remove_root(Handle handle, bool keep) {
    if (PyDict_DelItem(roots_.ptr(), at(handle).root->name_space.ptr()) != 0)
        throw nb::python_error();
    if (last_root_ == handle) {
        last_root_ = kNone;
        last_name_space_ = nb::object();
    }
    remove_sibling(live_roots_, handle);
    if (keep)
        append_sibling(detached_roots_, handle);
}

void Ledger::drop_detached(Handle handle, nb::list &freed) {
    Node &node = at(handle);
    if (node.parent == kNone) {
        remove_sibling(detached_roots_, handle);
    } else {
        unlink(handle);
        detached_tokens -= num_tokens(node);
        shares_.add_cached(node.share, -num_tokens(node));
        append_to(freed, freed_record(slots_copy(node, 0), node.streams));
    }
    forget(handle);
}

// ---- slots ----

nb::object Ledger::slots_copy(const Node &node, int64_t first) const {
    int64_t count = num_tokens(node) - first;
    if (count == 0)
        return records_.no_slots;
    int64_t *out = nullptr;
    nb::object array = new_slots(static_cast<size_t>(count), out);
    node.slots.copy_to(out, static_cast<size_t>(first), static_cast<size_t>(count), page_size_);
    return array;
}

nb::object Ledger::freed_record(const nb::object &slots, const nb::object &streams) const {
    return records_.make(records_.freed, slots, streams.is_valid() ? streams : records_.no_streams,
                         records_.no_slots);
}

}  // namespace aradix
