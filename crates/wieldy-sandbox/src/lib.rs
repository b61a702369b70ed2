//! wieldy-sandbox
