#pragma once
// The names of attributes, datasets and groups that files of each kind have: the tables of
// inputs/SCHEMA.md. Each reader asks for its own; here is what else a file may not have silently.

#include <functional>
#include <string>
#include <vector>

#include "io/h5.hpp"

namespace gyre {

/// A name of a schema.
struct SchemaName {
  enum class Presence { required, optional, depends };  ///< depends: on other names or values
  std::string place;  ///< "/logprobs/ids", a dataset; "/logprobs@top_k", an attribute
  Presence presence = Presence::required;
};

/// All names of a schema; none of one that is not known. What is behind a place that ends in "/*"
/// is free: it is checked by its reader, or is another program's.
const std::vector<SchemaName>& names_of_schema(const std::string& schema);

/// Compares a file's names with its schema's and `more` places. Throws a usage error for an
/// attribute that should be a dataset or the other way round, and for names that change what is
/// computed and that nobody reads ("softcap"), unless their values say that they do not. Every
/// other name is a note. No communication.
void check_names(const h5::File& file, const std::string& schema,
                 const std::vector<std::string>& more);

/// Whether an attribute that changes what is computed has a value that says that it does not:
/// `neutral`, false, or a text such as "none".
bool is_neutral(const h5::AttributeValue& value, double neutral);

/// Who prints notes about inputs: "a.h5: attribute 'x' of '/' is not read". Nobody at first.
void set_note_handler(std::function<void(const std::string&)> handler);

}  // namespace gyre
