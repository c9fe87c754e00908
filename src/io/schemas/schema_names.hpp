#pragma once
// Names of attributes, datasets and groups in files of each kind: the tables of inputs/SCHEMA.md.
// Readers look up the names that they need; this checks the names that nobody reads.

#include <functional>
#include <string>
#include <vector>

#include "io/h5.hpp"

namespace gyre {

/// A name of a schema.
struct SchemaName {
  enum class Presence { required, optional, depends };  ///< depends: on other names or values
  std::string place;  ///< "/logprobs/ids": a dataset; "/logprobs@top_k": an attribute
  Presence presence = Presence::required;
};

/// All names of a schema, which must be a known one. Objects below a place that ends in "/*" are
/// free: their reader checks them, or they belong to another program.
const std::vector<SchemaName>& names_of_schema(const std::string& schema);

/// Compares a file's names with its schema's and `more` places. Throws a usage error for an
/// attribute that should be a dataset or vice versa, and for unread names that change the
/// computation ("softcap"), unless their values turn them off. Prints a note for every other name.
/// No communication.
void check_names(const h5::File& file, const std::string& schema,
                 const std::vector<std::string>& more);

/// Whether the value of a modifier turns it off: `neutral`, false, or a text such as "none".
bool is_neutral(const h5::AttributeValue& value, double neutral);

/// Sets the printer of notes such as "a.h5: attribute 'x' of '/' is not read". By default none.
void set_note_handler(std::function<void(const std::string&)> handler);

}  // namespace gyre
