//! wieldy-core
