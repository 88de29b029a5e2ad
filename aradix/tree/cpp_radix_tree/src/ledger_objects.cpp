// What a ledger shows to Python: its events, and to the collector what it refers to.
#include "ledger.hpp"

namespace aradix {

// ---- events ----

void Ledger::record_stored(Handle handle) {
    Node &leaf = at(handle);
    const Node &parent = at(leaf.parent);
    Handle root = leaf.parent;
    while (at(root).parent != kNone)
        root = at(root).parent;
    const std::vector<uint8_t> &digest = at(root).root->digest;
    const uint8_t *previous = digest.data();
    size_t previous_size = digest.size();
    nb::object parent_hash = nb::none();
    if (!parent.hashes.empty()) {
        previous = parent.hashes.back().data();
        previous_size = parent.hashes.back().size();
        parent_hash = bytes_of(previous, previous_size);
    }
    extend_hash_chain(leaf.hashes, previous, previous_size, leaf.tokens.data(), leaf.tokens.size(), page_bytes_);
    record(Stored{packed_digests(leaf.hashes, 0), std::move(parent_hash),
                  event_tokens(leaf.tokens.data(), leaf.tokens.size(), item_bytes_), at(root).root->name_space});
}

void Ledger::record_removed(const Node &node, size_t first_page) {
    if (!records_events_ || node.hashes.empty())
        return;
    record(Removed{packed_digests(node.hashes, first_page)});
}

void Ledger::record_cleared() {
    if (records_events_)
        record(Cleared{});
}

void Ledger::record(Event event) {
    events_.push_back(std::move(event));
    if (events_.size() != 1 || !on_event.is_valid())
        return;
    nb::object listener = on_event;
    nb::object told = nb::steal(PyObject_CallNoArgs(listener.ptr()));
    if (!told.is_valid())
        PyErr_WriteUnraisable(listener.ptr());  // the step goes on
}

nb::object Ledger::take_events() {
    Step step(*this);
    std::vector<Event> events;
    events.swap(events_);
    nb::list taken;
    for (const Event &event : events) {
        if (const auto *stored = std::get_if<Stored>(&event)) {
            append_to(taken, records_.block_stored(stored->hashes, stored->parent, stored->tokens,
                                                   integer(static_cast<int64_t>(page_size_)), stored->name_space));
        } else if (const auto *removed = std::get_if<Removed>(&event)) {
            append_to(taken, records_.block_removed(removed->hashes));
        } else {
            append_to(taken, records_.all_blocks_cleared());
        }
    }
    return taken;
}

// ---- for the collector ----

int Ledger::traverse(visitproc visit, void *arg) {
    Py_VISIT(roots_.ptr());
    Py_VISIT(last_name_space_.ptr());
    Py_VISIT(on_event.ptr());
    if (int stop = ranking_.traverse(visit, arg))
        return stop;
    if (int stop = shares_.traverse(visit, arg))
        return stop;
    if (!marked_)
        return 0;
    int stop = 0;
    nodes_.for_each([&](Handle handle) {
        for (PyObject *mark : {at(handle).ready.ptr(), at(handle).streams.ptr()})
            if (stop == 0 && mark != nullptr)
                stop = visit(mark, arg);
    });
    return stop;
}

void Ledger::clear() {
    busy_ = true;  // nothing may come in any more
    ranking_.clear();
    shares_.clear();
    on_event.reset();
    nodes_.for_each([this](Handle handle) {
        nb::object ready = std::move(at(handle).ready);
        nb::object streams = std::move(at(handle).streams);
    });
}

}  // namespace aradix
