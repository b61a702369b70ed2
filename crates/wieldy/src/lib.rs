//! wieldy
