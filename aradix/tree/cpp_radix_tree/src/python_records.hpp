// The records of aradix.tree.protocol, and how Python values come in and go out.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "page_hashes.hpp"
#include "slot_of.hpp"

namespace aradix {

namespace nb = nanobind;

// What a call answers with. Held by each tree, so that nothing of an interpreter is kept in the module.
struct Records {
    Records();

    nb::object match, node_ref, freed, inserted, detached, closed, node_view, share_view, glance, on_device, ready;
    nb::object block_stored, block_removed, all_blocks_cleared;
    nb::object gates[4];
    nb::object nowhere, no_latch, no_match, no_slots, no_streams, nothing;
    nb::object name_data, name_start, name_stop, name_item_bytes, name_namespace, name_node_id, name_depth, name_rank;
    nb::object name_stream, name_sequence, name_tenant;
    nb::object key_type;
    KeySlots key_slots;

    // A NamedTuple of that class.
    template <class... Items> nb::object make(nb::handle type, const Items &...items) const {
        // What its `__new__` comes to, which is a function in Python.
        auto *record = reinterpret_cast<PyTypeObject *>(type.ptr());
        nb::object made = nb::steal(record->tp_alloc(record, sizeof...(Items)));
        if (!made.is_valid())
            throw nb::python_error();
        Py_ssize_t at = 0;
        ((PyTuple_SET_ITEM(made.ptr(), at++, nb::object(items).release().ptr())), ...);
        return made;
    }

    nb::object ref(int64_t node_id, int64_t depth) const;
    // A tuple of `Ready`, a null reference if it is empty.
    nb::object checked_ready(nb::handle ready) const;
    // The union of two sets of ready events, one a stream: a stream's later event covers its earlier ones.
    nb::object newest_ready(const nb::object &first, const nb::object &second) const;
};

nb::object integer(int64_t value);
nb::object bytes_of(const uint8_t *data, size_t size);
// The ids of tokens or bigrams, as events have them.
nb::object event_tokens(const uint8_t *tokens, size_t size, size_t item_bytes);
nb::object digest_list(const PageSpans &pages);
void append_to(nb::list &list, const nb::object &item);

// A key, cut to the whole pages of its first `limit` tokens. `name_space` and `data` are held while the step runs.
struct Key {
    Key(const Records &records, nb::handle key, size_t page_size, size_t page_bytes, std::optional<int64_t> limit);

    nb::object data, name_space;
    const uint8_t *tokens;
    size_t size;  // in bytes, all of it
    size_t stop;  // in bytes, of the whole pages to be looked at
};

// An array of slots as a caller gave it.
struct Slots {
    explicit Slots(nb::handle array);
    Slots(const int64_t *from, size_t count) : data(from), size(count) {}

    nb::object owner;
    const int64_t *data;
    size_t size;
};

// A new int64 array; `out` is where its values go.
nb::object new_slots(size_t size, int64_t *&out);

// A frozenset of streams, a null reference if it is empty.
nb::object checked_streams(nb::handle streams);
// An int of any size, kept within what 64 bits hold.
int64_t saturated(nb::handle number);

nb::object joined_streams(const nb::object &first, const nb::object &second);

}  // namespace aradix
