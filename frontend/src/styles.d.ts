/** Style sheets are bundled for their effect alone. */
declare module "*.css";
