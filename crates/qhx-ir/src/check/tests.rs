//! Every check says what is wrong and where.
